"""The exported class computes what the trainer's model computes: logits, loss, gradients."""

import pytest
import torch

from megahedge.config.mixer import MixerConfig
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


def test_a_loss_without_labels_to_score_is_0():
    exported = as_transformers(student(MIXERS["tuned"]))
    tokens = tokens_of(5)
    assert exported(tokens, labels=torch.full_like(tokens, -100)).loss == 0


def test_activation_checkpointing_changes_no_gradient():
    exported = as_transformers(student(MIXERS["tuned"]).double()).train()
    tokens = tokens_of(20, batch=2)
    grads = []
    for recomputes in (False, True):
        exported.zero_grad()
        if recomputes:
            exported.gradient_checkpointing_enable()
        exported(tokens, labels=tokens).loss.backward()
        grads.append([parameter.grad.clone() for parameter in exported.parameters()])
    assert exported.is_gradient_checkpointing
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
    config = HedgeMambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    attention = HedgeMambaForCausalLM(config).gpt_neox.layers[0].attention
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    step, rate = attention.decay(hidden)
    assert torch.equal(attention.conv(hidden, None, None)[0], hidden)
    torch.testing.assert_close(step, torch.ones_like(step))
    assert not rate.any() and not attention.gate_proj.weight.any()
    assert torch.equal(attention.query_map.weight, torch.eye(16))


@pytest.mark.parametrize(
    "options", [{"decay": "fast"}, {"rope_position": "beside"}, {"feature_map": "elu"}, {"mixer": "softmax"}, {"mixer": "hedgehog"}]
)
def test_a_config_of_another_kind_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        HedgeMambaConfig(**options)


def test_softmax_is_no_student():
    with pytest.raises(ValueError, match="mixer='softmax'"):
        HedgeMambaConfig(mixer=MixerConfig().kind)
