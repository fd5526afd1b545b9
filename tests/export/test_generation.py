"""What transformers' `generate` makes of an exported folder: the cache changes nothing, and neither does padding."""

import copy
import inspect
import weakref

import pytest
import torch

from megahedge.export.cache import Packing
from tests.export.small import MIXERS, as_transformers, left_padded, student, tokens_of

CLOSE = {"rtol": 0, "atol": 1e-4}  # fp32 logits of spread 1, chunks against single tokens; 2e-6 is what is seen
LENGTHS = (1, 5, 17, 300)


def generate(model, tokens, **options):
    """`generate` with a mask, without which it would take tokens that are the pad token for padding."""
    mask = {} if tokens is None else {"attention_mask": torch.ones_like(tokens)}
    return model.generate(tokens, **{"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | mask | options)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 70])
def test_greedy_text_is_that_of_a_model_without_cache(model, length):
    """One token, fewer than the convolution has taps, more than a chunk of the scan; each token is the likeliest after those before."""
    text = generate(model, tokens_of(length, batch=2), max_new_tokens=64)
    assert text.shape == (2, length + 64)
    likeliest = model(text, use_cache=False).logits.argmax(-1)
    assert torch.equal(likeliest[:, length - 1 : -1], text[:, length:])


def test_greedy_text_with_and_without_cache_is_the_same(model):
    texts = [generate(model, tokens_of(3, batch=2), use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*texts)


@torch.no_grad()
def test_any_division_of_a_text_gives_the_logits_of_the_whole(model):
    tokens = tokens_of(140, batch=2)
    expected = model(tokens, use_cache=False).logits
    for sizes in ([1, 1, 1, 137], [70, 1, 69], [2, 64, 74]):
        cache, logits = None, []
        for piece in tokens.split(sizes, dim=1):
            output = model(piece, cache=cache, use_cache=True)
            cache = output.cache
            logits.append(output.logits)
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, **CLOSE)
        assert cache.get_seq_length() == 140


@pytest.mark.parametrize("length", [64, 65, 140])
def test_a_long_text_is_read_piece_by_piece_where_no_gradient_is_wanted(model, monkeypatch, length):
    """With the logits, and the cache, of a text that is read at once."""
    tokens, following = tokens_of(length, batch=2), tokens_of(2, batch=2, seed=1)
    expected = model(tokens, use_cache=False).logits
    continued = model(torch.cat((tokens, following), dim=1), use_cache=False).logits[:, length:]
    monkeypatch.setattr(inspect.getmodule(type(model)), "PIECE", 32)
    read = []
    with model.gpt_neox.layers[0].register_forward_pre_hook(lambda _, given: read.append(given[0].shape[1])):
        assert model(tokens, use_cache=False).logits.requires_grad and read == [length]
        read.clear()
        with torch.no_grad():
            alone = model(tokens, use_cache=False)
            kept = model(tokens, use_cache=True)
            after = model(following, cache=kept.cache, use_cache=True)
    pieces = [32] * (length // 32) + [length % 32] * (length % 32 > 0)
    assert read == [*pieces, *pieces, 2] and alone.cache is None
    for found in (alone, kept):
        torch.testing.assert_close(found.logits, expected, **CLOSE)
    torch.testing.assert_close(after.logits, continued, **CLOSE)
    assert kept.cache.get_seq_length() == length + 2


@torch.no_grad()
def test_a_cache_that_is_not_to_be_written_is_read(model):
    """Several texts after one prefix; nothing of it is forgotten, and nothing is added to it."""
    prefix, kept = tokens_of(70, seed=2), None
    for seed in (3, 4):
        following = tokens_of(5, seed=seed)
        expected = model(torch.cat((prefix, following), dim=1), use_cache=False).logits[:, 70:]
        kept = kept or model(prefix, use_cache=True).cache
        output = model(following, cache=kept, use_cache=False)
        torch.testing.assert_close(output.logits, expected, **CLOSE)
        assert output.cache is None and kept.get_seq_length() == 70


@torch.no_grad()
def test_the_cache_goes_by_either_name(loaded):
    model, tokens = loaded["tuned"], tokens_of(12)
    for owner in (model, model.gpt_neox):
        output = owner(tokens[:, :9], use_cache=True)
        assert output.past_key_values is output.cache is not None
    rest = model(tokens[:, 9:], past_key_values=model(tokens[:, :9]).past_key_values)
    torch.testing.assert_close(rest.logits, model(tokens).logits[:, 9:], **CLOSE)


def test_no_token_that_is_written_waits_for_a_look_at_the_mask(monkeypatch):
    """Whether a mask leaves anything out is known on the device alone: it is asked once, of the prompt."""
    model, masks = as_transformers(student(MIXERS["tuned"])), []
    of = Packing.of
    monkeypatch.setattr(Packing, "of", lambda mask, *shape: masks.append(mask) or of(mask, *shape))
    tokens, mask = left_padded([tokens_of(9)[0], tokens_of(4)[0]])
    for options in ({}, {"num_beams": 2}):
        masks.clear()
        generate(model, tokens, attention_mask=mask, max_new_tokens=5, **options)
        assert [mask is None for mask in masks] == [False, True, True, True, True]


@torch.no_grad()
def test_no_more_hidden_states_are_held_than_asked_for():
    """In a prefill of many tokens each of them is as large as the input."""
    model, outputs, alive = as_transformers(student(MIXERS["tuned"], num_layers=3)), [], []

    def note(module, inputs, output):
        outputs.append(weakref.ref(output))
        alive.append(sum(made() is not None for made in outputs))

    for layer in model.gpt_neox.layers:
        layer.register_forward_hook(note)
    model(tokens_of(9))
    assert max(alive) == 2  # a layer's input and its output
    assert len(model(tokens_of(9), output_hidden_states=True).hidden_states) == 4


@torch.no_grad()
def test_the_cache_does_not_grow(model):
    def size(length):
        cache = model(tokens_of(length)).cache
        tensors = [tail for tail in cache.conv_tails if tail is not None]
        tensors += [tensor for state in cache.states for tensor in (state.numerator, state.denominator)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in (*tensors, cache.last_hidden)}
        return sum(storage.nbytes() for storage in storages.values())

    assert size(1) == size(200) > 0


@torch.no_grad()
def test_a_decoded_token_moves_the_states_on_in_their_own_memory(model):
    cache = model(tokens_of(9)).cache
    before = [(state.numerator.data_ptr(), state.numerator.clone()) for state in cache.states]
    model(tokens_of(1), cache=cache)
    for (pointer, numerator), state in zip(before, cache.states, strict=True):
        assert state.numerator.data_ptr() == pointer and not torch.equal(state.numerator, numerator)


@torch.no_grad()
def test_padding_on_the_left_changes_no_logit_and_no_text(model):
    rows = [tokens_of(length, seed=length)[0] for length in LENGTHS]
    batch, mask = left_padded(rows)
    logits = model(batch, attention_mask=mask).logits
    texts = generate(model, batch, attention_mask=mask)[:, batch.shape[1] :]
    for row, found, text in zip(rows, logits, texts, strict=True):
        torch.testing.assert_close(found[-len(row) :], model(row[None]).logits[0], **CLOSE)
        assert torch.equal(text, generate(model, row[None])[0, len(row) :])


@torch.no_grad()
def test_one_row_alone_may_be_padded_too(model):
    row = tokens_of(6)[0]
    batch, mask = left_padded([row], length=80)
    torch.testing.assert_close(model(batch, attention_mask=mask).logits[:, -6:], model(row[None]).logits, **CLOSE)
    assert torch.equal(generate(model, batch, attention_mask=mask)[:, 80:], generate(model, row[None])[:, 6:])


@torch.no_grad()
def test_padding_on_the_right_or_in_the_middle_is_left_out(model):
    """Also of what the cache keeps: the next token follows the last real one."""
    row, following = tokens_of(9, seed=3), tokens_of(1, seed=4)
    expected = model(torch.cat((row, following), dim=1)).logits
    for places in ([*range(9)], [0, 1, 2, 7, 8, 9, 10, 11, 14]):
        batch, mask = tokens_of(16, seed=5), torch.zeros(1, 16, dtype=torch.bool)
        batch[0, places], mask[0, places] = row[0], True
        output = model(batch, attention_mask=mask, use_cache=True)
        torch.testing.assert_close(output.logits[:, places], expected[:, :9], **CLOSE)
        after = model(following, cache=output.cache, attention_mask=torch.cat((mask, mask.new_ones(1, 1)), dim=1))
        torch.testing.assert_close(after.logits, expected[:, 9:], **CLOSE)


PADDED = {"left": [0] * 7 + [1] * 5, "right": [1] * 5 + [0] * 7, "holes": [0, 1, 1, 0, 0, 0, 1, 0, 1, 0, 1, 0]}
"""Masks of 12 columns of which 5 are real."""


@torch.no_grad()
@pytest.mark.parametrize("padding", PADDED)
def test_no_column_sees_a_later_token(padding, loaded):
    """One of padding neither, as one of a causal model with attention."""
    model, mask, tokens = loaded["tuned"], torch.tensor([PADDED[padding]]), tokens_of(12)
    logits = model(tokens, attention_mask=mask).logits
    for column in mask[0].nonzero().flatten().tolist():
        changed = tokens.clone()
        changed[0, column] = (tokens[0, column] + 1) % 50
        found = model(changed, attention_mask=mask).logits
        torch.testing.assert_close(found[:, :column], logits[:, :column], **CLOSE)
        assert (found[:, column] - logits[:, column]).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("name", ["stage1-paper", "paper"])
def test_text_goes_on_after_the_last_real_token(name, loaded):
    """Wherever the padding is, and whether the prompt is read at once or in chunks of which some are padding alone."""
    model = loaded[name]
    rows = [tokens_of(5, seed=seed)[0] for seed in range(len(PADDED))]
    mask = torch.tensor(list(PADDED.values()))
    batch = tokens_of(12, batch=len(rows), seed=9)
    batch[mask.bool()] = torch.cat(rows)
    alone = torch.cat([generate(model, row[None], max_new_tokens=4)[:, 5:] for row in rows])
    for options in ({}, {"prefill_chunk_size": 3}, {"use_cache": False}):
        assert torch.equal(generate(model, batch, attention_mask=mask, max_new_tokens=4, **options)[:, 12:], alone)


@torch.no_grad()
def test_a_row_of_padding_alone_harms_nobody(model):
    row = tokens_of(5)[0]
    batch, mask = left_padded([row, row[:0]])
    logits = model(batch, attention_mask=mask).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:1], model(row[None]).logits, **CLOSE)


def test_beams_with_and_without_cache_are_the_same(model):
    tokens, mask = left_padded([tokens_of(70)[0], tokens_of(3)[0]])
    options = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 6, "attention_mask": mask}
    texts = [generate(model, tokens, use_cache=use_cache, **options) for use_cache in (True, False)]
    assert texts[0].shape == (4, 76)
    assert torch.equal(*texts)
    assert not torch.equal(texts[0][0], texts[0][1])


def test_sampling_follows_its_seed_and_not_the_cache(model):
    texts = []
    for seed, use_cache in ((1, True), (1, True), (1, False), (2, True)):
        torch.manual_seed(seed)
        options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "num_return_sequences": 3, "use_cache": use_cache}
        texts.append(generate(model, tokens_of(4, batch=2), **options))
    assert texts[0].shape == (6, 12)
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2]) and not torch.equal(texts[0], texts[3])


@torch.no_grad()
def test_a_prompt_may_be_read_in_pieces_and_a_prefix_shared(loaded):
    model, tokens = loaded["tuned"], tokens_of(50)
    expected = generate(model, tokens)
    assert torch.equal(generate(model, tokens, prefill_chunk_size=7, cache=model(tokens[:, :1]).cache), expected)
    prefix = model(tokens[:, :20]).cache
    for _ in range(2):
        assert torch.equal(generate(model, tokens, cache=copy.deepcopy(prefix)), expected)


def test_embeddings_may_be_given_instead_of_tokens(loaded):
    model, tokens = loaded["tuned"], tokens_of(12)
    embeddings = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(tokens).logits)
    assert torch.equal(generate(model, None, inputs_embeds=embeddings), generate(model, tokens)[:, 12:])


@torch.no_grad()
def test_hidden_states_and_tuples_on_request(loaded):
    model, (tokens, mask) = loaded["tuned"], left_padded([tokens_of(9)[0], tokens_of(4)[0]])
    output = model(tokens, attention_mask=mask, output_hidden_states=True)
    assert [state.shape for state in output.hidden_states] == [(2, 9, 64)] * 3
    torch.testing.assert_close(model.embed_out(output.hidden_states[-1]), output.logits)
    real = mask.bool()
    torch.testing.assert_close(output.hidden_states[0][real], model.get_input_embeddings()(tokens)[real])
    assert not any(state[~real].any() for state in output.hidden_states)  # all of it stands before the first real token
    assert torch.equal(model(tokens, attention_mask=mask, return_dict=False)[0], output.logits)
    kept = model(tokens, attention_mask=mask, logits_to_keep=1).logits
    torch.testing.assert_close(kept, output.logits[:, -1:])
    kept = model(tokens, attention_mask=mask, logits_to_keep=torch.tensor([2, 7])).logits
    torch.testing.assert_close(kept, output.logits[:, [2, 7]])


def test_what_it_cannot_do_is_said(loaded):
    model, tokens = loaded["tuned"], tokens_of(4)
    with pytest.raises(ValueError, match="a cache of its own"):
        generate(model, tokens, cache_implementation="static")
    for use_cache in (True, False):
        with pytest.raises(ValueError, match="is a HedgeMambaCache, not a list"):
            model(tokens, cache=[], use_cache=use_cache)
    with pytest.raises(ValueError, match="cannot go on from a cache"):
        generate(model, tokens, cache=model(tokens[:, :2]).cache, use_cache=False)
    with pytest.raises(TypeError, match="position_ids: not known here"):
        model(tokens, position_ids=tokens, output_attentions=False)
    with pytest.raises(ValueError, match="position_ids: not known here"):
        generate(model, tokens, position_ids=tokens)
    with pytest.raises(TypeError, match="there is no attention"):
        model(tokens, output_attentions=True)
    with pytest.raises(ValueError, match="one of 1 layers, the model has 2"):
        model(tokens, cache=type(model(tokens).cache)(1))
    with pytest.raises(ValueError, match="the cache has 1 rows, the input 2"):
        model(tokens_of(4, batch=2), cache=model(tokens).cache)
    with pytest.raises(ValueError, match="there are no tokens"):
        model(tokens[:, :0])
    with pytest.raises(ValueError, match=r"labels are \[1, 1\], where the input is \[1, 4\]"):
        model(tokens, labels=tokens[:, :1])
    with pytest.raises(ValueError, match="either labels or logits_to_keep"):
        model(tokens, labels=tokens, logits_to_keep=torch.tensor([0]))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="attention_mask is"):
        model(tokens, attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"2 rows and at least 4 columns, not \[1, 4\]"):
        model(tokens_of(4, batch=2), attention_mask=torch.tensor([[1, 0, 1, 1]]))
