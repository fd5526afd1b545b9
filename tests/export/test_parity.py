"""The exported class computes what the trainer's model computes: logits, loss, gradients."""

import pytest
import torch

from megahedge.config.mixer import MixerConfig
from megahedge.export.cache import HedgeMambaCache
from megahedge.export.configuration_hedge_mamba import HedgeMambaConfig
from megahedge.export.modeling_hedge_mamba import HedgeMambaForCausalLM
from megahedge.models.families import FAMILIES
from tests.export.small import COMBINATIONS, MIXERS, as_transformers, student, tokens_of

EXACT = {"rtol": 0, "atol": 1e-9}  # fp64, in which two orders of the same sums differ by 1e-13
LENGTHS = (1, 2, 63, 130)  # a token, fewer than the convolution has taps, one less than a chunk of the scan, more than two chunks
MODELS = {
    "sequential": {"parallel_residual": False},
    "tied": {"tie_word_embeddings": True},
    "no bias, all rotated": {"attention_bias": False, "rotary_pct": 1.0},
    "none rotated, relu": {"rotary_pct": 0.0, "activation": "relu"},
    "gelu_new": {"activation": "gelu_new", "norm_eps": 1e-3, "rotary_base": 100.0},
}


def assert_same_logits(reference, lengths=LENGTHS):
    exported = as_transformers(reference)
    for length in lengths:
        tokens = tokens_of(length, batch=2)
        with torch.no_grad():
            torch.testing.assert_close(exported(tokens).logits, reference(tokens), **EXACT)


@pytest.mark.parametrize("name", [*MIXERS, *COMBINATIONS])
def test_logits_are_the_trainers_for_every_mixer(name):
    assert_same_logits(student((MIXERS | COMBINATIONS)[name], num_layers=1).double())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_trainers_for_every_kind_of_block(name):
    assert_same_logits(student(MIXERS["tuned"], **MODELS[name]).double(), lengths=(70,))


@pytest.mark.parametrize("name", MIXERS)
def test_loss_and_every_gradient_are_the_trainers(name):
    """Labels as transformers has them, equal to the input; the trainer's are shifted."""
    reference = student(MIXERS[name]).double()
    exported = as_transformers(reference).train()
    tokens = tokens_of(67, batch=2)
    labels = tokens.clone()
    labels[0, :40] = -100
    output = exported(tokens, labels=labels)
    assert output.cache is None
    output.loss.backward()
    losses = reference.token_losses(tokens[:, :-1], labels[:, 1:])
    expected = losses.sum() / (labels[:, 1:] != -100).sum()
    expected.backward()
    torch.testing.assert_close(output.loss, expected, **EXACT)
    parameters = dict(exported.named_parameters())
    assert len(parameters) == len(list(reference.parameters()))
    for name, parameter in reference.named_parameters():
        grad = parameters[FAMILIES[reference.config.family].hf_name(name)].grad
        torch.testing.assert_close(grad, parameter.grad, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


PLACES = {"left": ([7, 8, 9, 10, 11], range(3, 12)), "right": (range(5), range(9)), "holes": ([1, 2, 6, 8, 11], [0, *range(2, 9), 10])}
"""Columns, of 12, of rows of 5 and 9 tokens."""


@pytest.mark.parametrize("name", ["stage1-paper", "paper", "tuned"])
@pytest.mark.parametrize("padding", PLACES)
def test_a_padded_batch_trains_as_its_rows_alone(padding, name):
    """Each token is to be predicted by the real one before it, whatever is between, and the first of a row by none."""
    exported = as_transformers(student(MIXERS[name]).double()).train()
    rows = [tokens_of(length, seed=length) for length in (5, 9)]
    batch, mask = tokens_of(12, batch=2, seed=9), torch.zeros(2, 12, dtype=torch.int64)
    for index, (row, places) in enumerate(zip(rows, PLACES[padding], strict=True)):
        batch[index, list(places)], mask[index, list(places)] = row[0], 1
    expected = sum(exported(row, labels=row, num_items_in_batch=4 + 8).loss for row in rows)
    expected.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in exported.named_parameters()}
    exported.zero_grad()
    embeddings = exported.get_input_embeddings()(batch)
    embeddings.retain_grad()
    loss = exported(inputs_embeds=embeddings, attention_mask=mask, labels=batch).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, **EXACT)
    for name, parameter in exported.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")
    real = mask.bool()
    assert embeddings.grad[real].any(dim=1).sum() == 12  # all real ones but the last of a row, which has nothing to predict
    assert not embeddings.grad[~real].any()


def test_a_loss_without_labels_to_score_is_0():
    exported = as_transformers(student(MIXERS["tuned"]))
    tokens = tokens_of(5)
    assert exported(tokens, labels=torch.full_like(tokens, -100)).loss == 0


def test_batches_that_are_accumulated_weigh_each_label_the_same():
    """Divided by the labels of both, however these fall on the batches."""
    exported = as_transformers(student(MIXERS["tuned"]).double())
    tokens = tokens_of(20, batch=2)
    labels = tokens.clone()
    labels[0, :15] = -100
    count = (labels[:, 1:] != -100).sum()
    whole = exported(tokens, labels=labels).loss
    for num_items in (count, int(count)):
        parts = [exported(tokens[[row]], labels=labels[[row]], num_items_in_batch=num_items).loss for row in (0, 1)]
        torch.testing.assert_close(sum(parts), whole, **EXACT)


@pytest.mark.slow
def test_transformers_trainer_weighs_each_label_the_same(tmp_path):
    """A step of two batches is that of one batch of both."""
    from transformers import Trainer, TrainingArguments

    tokens = tokens_of(12, batch=2)
    labels = tokens.clone()
    labels[0, :9] = -100
    data = [{"input_ids": tokens[row], "labels": labels[row]} for row in (0, 1)]
    trained = []
    for size in (1, 2):
        exported = as_transformers(student(MIXERS["tuned"]))
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 2 // size, "max_steps": 1}
        arguments = TrainingArguments(tmp_path, **sizes, optim="sgd", learning_rate=1.0, max_grad_norm=0, report_to=[], use_cpu=True)
        Trainer(exported, arguments, train_dataset=data).train()
        trained.append(torch.cat([parameter.detach().flatten() for parameter in exported.parameters()]))
    start = torch.cat([parameter.detach().flatten() for parameter in as_transformers(student(MIXERS["tuned"])).parameters()])
    assert (trained[0] - trained[1]).norm() < 1e-5 * (trained[1] - start).norm()  # fp32; a mean of means is 0.5 off


@pytest.mark.parametrize("use_cache", [False, True])
def test_activation_checkpointing_changes_no_gradient(use_cache):
    exported = as_transformers(student(MIXERS["tuned"]).double()).train()
    tokens = tokens_of(20, batch=2)
    grads = []
    for recomputes in (False, True):
        exported.zero_grad()
        if recomputes:
            exported.gradient_checkpointing_enable()
        output = exported(tokens, labels=tokens, use_cache=use_cache)
        assert (output.cache is None) == (recomputes or not use_cache)
        output.loss.backward()
        grads.append([parameter.grad.clone() for parameter in exported.parameters()])
    assert exported.is_gradient_checkpointing
    with pytest.raises(ValueError, match="cannot go on from a cache"):
        exported(tokens, cache=HedgeMambaCache(2))
    for before, after in zip(*grads, strict=True):
        torch.testing.assert_close(after, before, **EXACT)


def test_a_rate_below_0_counts_as_0_and_can_come_back():
    """Where users fine-tune, their optimizer knows nothing of the bound."""
    exported = as_transformers(student(MIXERS["tuned"]).double())
    tokens, rate = tokens_of(20), exported.gpt_neox.layers[0].attention.decay.rate.weight
    results = []
    for value in (0.0, -0.3):
        with torch.no_grad():
            rate.fill_(value)
        exported.zero_grad()
        exported(tokens, labels=tokens).loss.backward()
        results.append(rate.grad.clone())
    torch.testing.assert_close(*results)
    assert results[0].all()


def test_bf16_is_near_fp32_and_keeps_its_states_in_fp32():
    reference = student(MIXERS["tuned"])
    tokens = tokens_of(70)
    output = as_transformers(reference).bfloat16()(tokens)
    assert output.logits.dtype == torch.bfloat16
    assert all(state.numerator.dtype == state.denominator.dtype == torch.float32 for state in output.cache.states)
    difference = output.logits.float() - reference(tokens)
    assert difference.abs().max() < 0.15  # logits of spread 1; bf16 rounds to 4e-3 in each of some 20 operations in a row


def test_a_fresh_model_starts_as_identities():
    sizes = dict(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    attention = HedgeMambaForCausalLM(HedgeMambaConfig(**sizes, bypass=True)).gpt_neox.layers[0].attention
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    step, rate = attention.decay(hidden)
    assert torch.equal(attention.conv(hidden, None, None)[0], hidden)
    torch.testing.assert_close(step, torch.ones_like(step))
    assert not rate.any() and not attention.gate_proj.weight.any() and not attention.bypass_proj(hidden).any()
    assert torch.equal(attention.query_map.weight, torch.eye(16))


@pytest.mark.parametrize("name", ["paper", "tuned", "state"])
def test_parameters_that_come_from_a_file_are_not_initialised(name):
    """Some versions of transformers initialise all modules after loading, and mark the parameters that are to stay."""
    exported = as_transformers(student(MIXERS[name]))
    before = {name: parameter.detach().clone() for name, parameter in exported.named_parameters()}
    for parameter in exported.parameters():
        parameter._is_hf_initialized = True
    for module in exported.modules():
        exported._init_weights(module)
    assert all(torch.equal(parameter, before[name]) for name, parameter in exported.named_parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"decay": "fast"},
        {"rope_position": "beside"},
        {"feature_map": "elu"},
        {"mixer": "softmax"},
        {"mixer": "mamba"},
        {"mixer": "hedgehog"},
    ],
)
def test_a_config_of_another_kind_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        HedgeMambaConfig(**options)


def test_a_step_without_decay_may_have_any_name():
    """Runs have recorded it in more than one way."""
    assert HedgeMambaConfig(decay="none", decay_step="none").decay_step == "none"
    with pytest.raises(ValueError, match="decay_step"):
        HedgeMambaConfig(decay="head", decay_step="none")


def test_a_hedgehog_has_no_bypass_and_a_config_of_before_has_none_either():
    with pytest.raises(ValueError, match="bypass=False"):
        HedgeMambaConfig(mixer="hedgehog", decay="none", conv_kernel=0, gate=False, bypass=True)
    assert not HedgeMambaConfig().bypass


def test_softmax_is_no_student():
    with pytest.raises(ValueError, match="mixer='softmax'"):
        HedgeMambaConfig(mixer=MixerConfig().kind)
