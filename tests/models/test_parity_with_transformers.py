"""Our model is transformers' model: logits and every gradient."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from megahedge.models.context import SequenceContext
from megahedge.models.families import FAMILIES
from megahedge.models.language_model import LanguageModel
from megahedge.models.rotary import Rotary
from megahedge.parallel.loss import vocab_parallel_cross_entropy
from tests.models.small import SINGLE, random_tokens, randomize, small_config

# fp32 sums of a few hundred terms in another order: 1e-7 to 3e-6 measured, a wrong formula gives 1e-2 and more
RELATIVE_TOLERANCE = 1e-5


def relative_difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours - reference).norm() / reference.norm()).item()


def transformers_twin(model: LanguageModel) -> torch.nn.Module:
    """transformers' model of the same config with the same parameters."""
    family = FAMILIES[model.config.family]
    hf_config = family.hf_config(model.config)
    twin = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config), attn_implementation="eager")
    ours = {family.hf_name(name): parameter for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(ours[family.canonical_name(name)])
    return twin


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("parallel_residual", "rotary_pct", "head_dim", "tied"),
    [(*case, False) for case in itertools.product((True, False), (0.25, 1.0), (32, 64, 80))]
    + [(True, 0.25, 32, True), (False, 0.0, 32, False)],
)
def test_logits_and_gradients_match_transformers(family, parallel_residual, rotary_pct, head_dim, tied):
    config = small_config(
        family=family,
        parallel_residual=parallel_residual,
        rotary_pct=rotary_pct,
        hidden_size=2 * head_dim,
        num_heads=2,
        tie_word_embeddings=tied,
    )
    model = randomize(LanguageModel(config))
    twin = transformers_twin(model)
    tokens = random_tokens(config.vocab_size, seq_len=38)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]

    logits, twin_logits = model(inputs), twin(inputs).logits
    assert relative_difference(logits, twin_logits) <= RELATIVE_TOLERANCE

    vocab_parallel_cross_entropy(logits, labels, config.vocab_size, SINGLE).backward()
    F.cross_entropy(twin_logits.flatten(0, 1), labels.flatten()).backward()
    ours = {FAMILIES[family].hf_name(name): parameter.grad for name, parameter in model.named_parameters()}
    twins = {FAMILIES[family].canonical_name(name): parameter.grad for name, parameter in twin.named_parameters()}
    assert ours.keys() == twins.keys()
    differences = {name: relative_difference(ours[name], twins[name]) for name in ours}
    assert max(differences.values()) <= RELATIVE_TOLERANCE, differences


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu"])
@pytest.mark.parametrize("attention_bias", [True, False])
def test_every_activation_and_missing_biases_match_transformers(activation, attention_bias):
    model = randomize(LanguageModel(small_config(activation=activation, attention_bias=attention_bias)))
    tokens = random_tokens(97)
    assert relative_difference(model(tokens), transformers_twin(model)(tokens).logits) <= RELATIVE_TOLERANCE


def logits_at(model: LanguageModel, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The model's logits of tokens that stand at `positions`."""
    context = SequenceContext(Rotary.of(positions, model.config))
    hidden = model.embedding(tokens)
    for block in model.blocks:
        hidden = block(hidden, context)
    return model.lm_head(model.final_norm(hidden))


def test_positions_shift_only_the_rotation():
    """RoPE is relative: the same shift of all positions changes nothing; a gap between positions does."""
    model = randomize(LanguageModel(small_config()))
    tokens = random_tokens(97)
    shifted = logits_at(model, tokens, torch.arange(13) + 40)
    assert relative_difference(shifted, model(tokens)) <= RELATIVE_TOLERANCE
    gap = torch.arange(13) + 7 * (torch.arange(13) > 5)
    assert relative_difference(logits_at(model, tokens, gap), model(tokens)) > 1e-3
    per_sequence = logits_at(model, tokens, torch.stack((torch.arange(13), gap)))
    assert torch.equal(per_sequence[0], model(tokens)[0])
    assert relative_difference(per_sequence[1], logits_at(model, tokens, gap)[1]) <= RELATIVE_TOLERANCE


def test_rotation_keeps_fp32_positions_when_the_model_is_bf16():
    """bf16 holds no whole number above 256 exactly; the angles must not go through it."""
    model = randomize(LanguageModel(small_config(rotary_pct=1.0, num_layers=1)))
    tokens = random_tokens(97, batch=1, seq_len=31)
    far = torch.arange(31) + 100_001
    half = model.bfloat16()
    difference = relative_difference(logits_at(half, tokens, far).float(), half(tokens).float())
    assert difference <= 0.03  # bf16 noise of one layer, measured 0.004; positions in bf16 give 0.23


def test_activation_checkpointing_changes_no_gradient():
    config = small_config()
    gradients = []
    for checkpointing in (False, True):
        model = randomize(LanguageModel(config, activation_checkpointing=checkpointing))
        model.embedding.weight.requires_grad_(False)  # the re-entrant form would lose every gradient here
        model(random_tokens(97)).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
