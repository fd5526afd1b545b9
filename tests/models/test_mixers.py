"""Feature maps, decays, convolution and gate are the paper's; documents in one row do not see each other."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from megahedge.config.mixer import KINDS, STEP_AXES, MixerConfig
from megahedge.config.model import ModelConfig
from megahedge.kernels import DenominatorStats
from megahedge.models.context import SequenceContext
from megahedge.models.language_model import LanguageModel
from megahedge.models.mixers import MIXERS
from megahedge.models.mixers.decay import DECAYS, STEP_OFFSET
from megahedge.models.mixers.feature_maps import HedgehogMap
from megahedge.models.mixers.hedge_mamba import GATE_OFFSET
from megahedge.parallel.initialize import initialize_parameters
from megahedge.training.optim import decays
from tests.models.listing2 import feature_map, listing_2, mamba
from tests.models.small import SINGLE, random_tokens, randomize, small_config

EPS32 = torch.finfo(torch.float32).eps
DECAY_STEPS = [("none", "head"), *((structure, axis) for structure, axes in STEP_AXES.items() for axis in axes)]
SWITCHES = list(itertools.product((False, True), repeat=2))


def tiny_config(**options) -> ModelConfig:
    """Two heads of 4 features, of which RoPE turns 2."""
    sizes = dict(hidden_size=8, num_heads=2, intermediate_size=8, rotary_pct=0.5, vocab_size=23)
    return small_config(**sizes, mixer=MixerConfig(**{"kind": "hedge_mamba", **options}))


def random_mixer(config: ModelConfig, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """The first layer's mixer, with random parameters."""
    return randomize(LanguageModel(dataclasses.replace(config, num_layers=1)).to(dtype)).blocks[0].mixer


def fresh_mixer(config: ModelConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The first layer's mixer as it starts: its added parts are identities."""
    model = LanguageModel(dataclasses.replace(config, num_layers=1)).to(dtype)
    initialize_parameters(model, 0, SINGLE)
    return model.blocks[0].mixer


def context_of(seq_len: int, config: ModelConfig, batch: int = 1) -> SequenceContext:
    return SequenceContext.of(torch.zeros(batch, seq_len, dtype=torch.long), config)


def random_input(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ---- feature maps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("per_head", "scale"), SWITCHES)
def test_feature_map_is_a_softmax_of_the_map_and_its_negative(per_head, scale):
    config = tiny_config(feature_map_per_head=per_head, feature_map_scale=scale)
    mixer = random_mixer(config)
    x = random_input(2, 5, 2, 4)
    for name in ("query_map", "key_map"):
        parameters = {f"{name}.{key}": value for key, value in getattr(mixer, name).named_parameters()}
        found = getattr(mixer, name)(x)
        for row, head in itertools.product(range(2), range(2)):
            torch.testing.assert_close(found[row, :, head], feature_map(parameters, config, x[row, :, head], name, head))


@pytest.mark.parametrize("per_head", [False, True])
def test_features_are_positive_and_sum_to_one(per_head):
    maps = random_mixer(tiny_config(feature_map_per_head=per_head), torch.float32).query_map
    features = maps(random_input(2, 5, 2, 4, dtype=torch.float32))
    assert features.shape == (2, 5, 2, 8)
    assert (features > 0).all()
    torch.testing.assert_close(features.sum(-1), torch.ones(2, 5, 2))


@pytest.mark.parametrize("per_head", [False, True])
def test_a_feature_map_starts_at_the_identity(per_head):
    maps = fresh_mixer(tiny_config(feature_map_per_head=per_head), torch.float64).query_map
    x = random_input(1, 3, 2, 4)
    torch.testing.assert_close(maps(x), torch.cat((x, -x), -1).softmax(-1))


@pytest.mark.parametrize("per_head", [False, True])
def test_features_are_fp32_whatever_the_precision_around_them(per_head):
    maps = random_mixer(tiny_config(feature_map_per_head=per_head), torch.float32).query_map.bfloat16()
    x = random_input(1, 3, 2, 4, dtype=torch.bfloat16)
    found = maps(x)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = maps(x)
    expected = maps.float()(x.float())  # the same values: bf16 fits into fp32
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert torch.equal(under_autocast, expected)


def test_gradients_of_the_map_in_bf16_come_through_fp32():
    maps = random_mixer(tiny_config(), torch.float32).query_map.bfloat16()
    maps(random_input(1, 3, 2, 4, dtype=torch.bfloat16)).square().sum().backward()
    assert all(parameter.grad.dtype == torch.bfloat16 and parameter.grad.any() for parameter in maps.parameters())


# ---- decays -------------------------------------------------------------------------------------------------------------------


def test_the_offsets_are_the_inverses_of_1():
    assert F.softplus(torch.tensor(STEP_OFFSET, dtype=torch.float64)).item() == pytest.approx(1, abs=1e-15)
    assert F.silu(torch.tensor(GATE_OFFSET, dtype=torch.float64)).item() == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("structure", "axis"), DECAY_STEPS[1:])
@pytest.mark.parametrize(("per_head", "tied"), SWITCHES)
def test_a_decay_starts_with_no_decay_and_steps_of_one(structure, axis, per_head, tied, dtype):
    config = tiny_config(decay=structure, decay_step=axis, decay_per_head=per_head, decay_tie_signs=tied)
    step, rate = fresh_mixer(config, dtype).decay(random_input(1, 3, 8, dtype=dtype))
    assert step.dtype == rate.dtype == torch.float32
    assert not rate.any()
    assert (step - 1).abs().max() <= EPS32


@pytest.mark.parametrize(("structure", "axis"), DECAY_STEPS[1:])
@pytest.mark.parametrize(("per_head", "tied"), SWITCHES)
def test_a_decay_has_the_shape_of_its_structure(structure, axis, per_head, tied):
    config = tiny_config(decay=structure, decay_step=axis, decay_per_head=per_head, decay_tie_signs=tied)
    step, rate = random_mixer(config).decay(random_input(1, 3, 8))
    heads = 2 if per_head else 1
    assert rate.shape == (heads, *{"head": (), "state": (8,), "channel": (8, 4)}[structure])
    assert step.shape == (1, 3, heads, {"head": 1, "state": 8, "channel": 4}[axis])
    assert (rate >= 0).all() and (step > 0).all()


@pytest.mark.parametrize(("structure", "axis"), [pair for pair in DECAY_STEPS if pair[0] in ("state", "channel")])
@pytest.mark.parametrize("tied", [False, True])
def test_a_feature_and_its_negative_share_where_signs_are_tied(structure, axis, tied):
    """Features are [W x + b, −(W x + b)]: number i and number p + i."""
    config = tiny_config(decay=structure, decay_step=axis, decay_tie_signs=tied)
    step, rate = random_mixer(config).decay(random_input(1, 3, 8))
    assert torch.equal(rate[:, :4], rate[:, 4:]) == tied
    assert len(rate[:, :4].unique()) == rate[:, :4].numel()  # and nothing else is shared
    if axis == "state":
        assert torch.equal(step[..., :4], step[..., 4:]) == tied
        assert len(step[0, 0, 0, :4].unique()) == 4


def test_the_width_of_the_step_is_a_sixteenth_or_what_is_asked_for():
    def shape(**options):
        return tuple(random_mixer(small_config(mixer=MixerConfig(kind="hedge_mamba", **options))).decay.step.down_weight.shape)

    assert shape() == (4, 64)
    assert shape(decay_rank=7) == (7, 64)


# ---- the whole mixer ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", ["before", "after"])
@pytest.mark.parametrize(("structure", "axis"), DECAY_STEPS)
def test_hedge_mamba_is_listing_2(structure, axis, rope):
    """Against an implementation of its own, for every decay; the other switches go round."""
    for number, (per_head, tied) in enumerate(SWITCHES):
        others = dict(
            feature_map_per_head=number % 2 == 1,
            feature_map_scale=number == 2,
            conv_kernel=(4, 3, 0, 1)[number],
            gate=number != 3,
            bypass=number in (1, 3),
        )
        options = dict(rope=rope, decay=structure, decay_step=axis, decay_per_head=per_head, decay_tie_signs=tied, **others)
        config = tiny_config(**options)
        mixer = random_mixer(config)
        x, stats = random_input(2, 7, 8), DenominatorStats()
        context = dataclasses.replace(context_of(7, config), stats=stats)
        with torch.no_grad():
            partial, bias = mixer(x, context)
            expected = torch.stack([listing_2(dict(mixer.named_parameters()), config, row) for row in x])
        assert not stats.clamped
        # fp64 but for RoPE's angles, which are fp32 in both
        assert ((partial + bias) - expected).norm() <= 1e-10 * expected.norm(), config.mixer


def with_plain_output(mixer: torch.nn.Module) -> torch.nn.Module:
    """What it mixes comes out as it is."""
    with torch.no_grad():
        mixer.out_proj.weight.copy_(torch.eye(len(mixer.out_proj.weight)))
    return mixer


def mixed(mixer: torch.nn.Module, x: torch.Tensor, context: SequenceContext) -> torch.Tensor:
    """Its output without the output's bias, [b, t, h, p]."""
    return mixer(x, context)[0].unflatten(-1, (mixer.num_local_heads, mixer.head_dim))


MIXED_FORMS = [dict(kind="softmax"), dict(kind="hedgehog", rope="before"), dict(kind="hedgehog", rope="after")] + [
    dict(kind="hedge_mamba", gate=False, rope=rope, decay=structure, decay_step=axis, decay_per_head=per_head)
    for (structure, axis), rope, per_head in itertools.product(DECAY_STEPS, ("before", "after"), (False, True))
]


@pytest.mark.parametrize("options", MIXED_FORMS, ids=lambda options: " ".join(map(str, options.values())))
def test_the_first_token_is_its_value_and_values_of_one_stay_one(options):
    config = tiny_config(**options)
    mixer = with_plain_output(random_mixer(config, torch.float32))
    x, context = random_input(2, 9, 8, dtype=torch.float32), context_of(9, config, batch=2)
    with torch.no_grad():
        source = mixer.conv(x, None) if options["kind"] == "hedge_mamba" else x
        values = mixer.project(source)[2]
        # 4 ulp in fp32
        torch.testing.assert_close(mixed(mixer, x, context)[:, 0], values[:, 0], rtol=4 * EPS32, atol=4 * EPS32)

        rows = mixer.qkv_proj.weight.unflatten(0, (2, 3, 4))
        rows[:, 2] = 0.0
        mixer.qkv_proj.bias.unflatten(0, (2, 3, 4))[:, 2] = 1.0
        ones = mixed(mixer, x, context)
    # numerator and denominator are the same sums, so that even where signed features cancel both keep the same error
    torch.testing.assert_close(ones, torch.ones_like(ones), rtol=0, atol=4 * EPS32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gate_starts_at_one_to_the_last_bit_of_fp32(dtype):
    mixer = fresh_mixer(tiny_config(), dtype)
    gate = mixer.gate(random_input(2, 9, 8, dtype=dtype))
    assert gate.dtype == torch.float32
    assert gate.shape == (2, 9, 2, 4)
    assert (gate - 1).abs().max() <= EPS32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_convolution_starts_as_the_identity(dtype):
    mixer = fresh_mixer(tiny_config(), dtype)
    x = random_input(2, 9, 8, dtype=dtype)
    assert torch.equal(mixer.conv(x, None), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bypass_starts_as_nothing(dtype):
    x, context = random_input(2, 9, 8, dtype=dtype), context_of(9, tiny_config(), batch=2)
    with_bypass, without = (fresh_mixer(tiny_config(bypass=bypass), dtype) for bypass in (True, False))
    assert torch.equal(with_bypass(x, context)[0], without(x, context)[0])


# ---- straight to Mamba --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("taps", "rank"), [(4, 0), (2, 3), (0, 5)])
def test_mamba_is_its_equations(taps, rank):
    config = tiny_config(kind="mamba", conv_kernel=taps, decay_rank=rank)
    mixer, x = random_mixer(config), random_input(2, 7, 8)
    with torch.no_grad():
        partial, bias = mixer(x, context_of(7, config, batch=2))
        expected = torch.stack([mamba(dict(mixer.named_parameters()), config, row) for row in x])
    assert bias is None
    assert (partial - expected).norm() <= 1e-10 * expected.norm()  # fp64


def test_mamba_starts_as_mamba_does():
    """Variances of torch's linear and convolution layers; rates 1 … 16; steps from 1e-3 to 1e-1; D = 1."""
    mixer = fresh_mixer(small_config(hidden_size=256, mixer=MixerConfig(kind="mamba")))
    start = dict(mixer.named_parameters())
    fan_in = {"conv.weight": 4, "step.up_weight": 16} | dict.fromkeys(("x_proj", "z_proj", "B_proj", "C_proj", "step.down_weight"), 256)
    for name, count in fan_in.items():
        weight = start.get(name, start.get(f"{name}.weight"))
        uniform = torch.empty(100_000).uniform_(-(count**-0.5), count**-0.5, generator=torch.Generator().manual_seed(0))
        assert weight.std().item() == pytest.approx(uniform.std().item(), rel=0.1), name  # 1024 draws and more: 2 % of standard error
    residuals = 2  # of the one layer of `fresh_mixer`
    assert start["y_proj.weight"].std().item() == pytest.approx((3 * 256 * residuals) ** -0.5, rel=0.1)
    assert not start["conv.bias"].any() and not start["step.down_bias"].any() and (start["skip.weight"] == 1).all()
    torch.testing.assert_close(mixer.rate(), torch.arange(1.0, 17).view(1, 16, 1).expand(4, 16, 64))
    with torch.no_grad():
        start["step.up_weight"].zero_()
        step = mixer.step(random_input(1, 1, 256, dtype=torch.float32))[0, 0]
    torch.testing.assert_close(step, torch.logspace(-3, -1, 64).expand(4, 64), rtol=1e-4, atol=0)  # through a bias in fp32


def test_no_rate_step_skip_or_tap_of_a_mamba_decays():
    mixer = fresh_mixer(tiny_config(kind="mamba"))
    decaying = {name for name, parameter in mixer.named_parameters() if decays(parameter)}
    assert decaying == {f"{letter}_proj.weight" for letter in "xyzBC"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rates_and_steps_of_a_mamba_are_fp32_whatever_the_precision_around_them(dtype):
    mixer, x = random_mixer(tiny_config(kind="mamba"), dtype), random_input(2, 9, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert mixer.rate().dtype == mixer.step(x).dtype == torch.float32
        assert mixer(x, context_of(9, tiny_config(), batch=2))[0].dtype == dtype


# ---- documents ----------------------------------------------------------------------------------------------------------------


DOCUMENT_FORMS = [dict(kind="softmax"), dict(kind="mamba"), dict(kind="hedgehog", rope="before"), dict(kind="hedgehog", rope="after")] + [
    dict(kind="hedge_mamba", decay=structure, decay_step=axis, rope=rope)
    for (structure, axis), rope in itertools.product(DECAY_STEPS, ("before", "after"))
]
LENGTHS = ((5, 1, 6), (2, 7, 3))


@pytest.mark.parametrize("options", DOCUMENT_FORMS, ids=lambda options: " ".join(map(str, options.values())))
@pytest.mark.parametrize("parallel_residual", [True, False])
def test_a_row_of_documents_equals_its_documents_run_apart(options, parallel_residual):
    """Logits and every gradient; states, convolution, attention and positions start anew with each document."""
    config = dataclasses.replace(tiny_config(**options), parallel_residual=parallel_residual)
    tokens = random_tokens(23, batch=2, seq_len=12)
    boundaries = torch.zeros(2, 12, dtype=torch.bool)
    for row, lengths in enumerate(LENGTHS):
        boundaries[row, list(itertools.accumulate(lengths))[:-1]] = True
    boundaries[0, 0] = True  # whether the first token is marked makes no difference
    weights = random_input(2, 12, 23)

    together, apart = (randomize(LanguageModel(config).double()) for _ in range(2))
    logits = together(tokens, boundaries)
    (logits * weights).sum().backward()
    pieces = []
    for row, lengths in enumerate(LENGTHS):
        parts = [apart(part.unsqueeze(0)).squeeze(0) for part in tokens[row].split(lengths)]
        pieces.append(torch.cat(parts))
    expected = torch.stack(pieces)
    (expected * weights).sum().backward()

    assert (logits - expected).norm() <= 1e-10 * expected.norm()
    gradients = {name: parameter.grad for name, parameter in apart.named_parameters()}
    scale = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name, parameter in together.named_parameters():
        assert (parameter.grad - gradients[name]).norm() <= 1e-10 * scale, name
    assert (together(tokens) - expected).norm() > 1e-3 * expected.norm()  # the boundaries matter


# ---- memory -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", DOCUMENT_FORMS[1:], ids=lambda options: " ".join(map(str, options.values())))
def test_activation_checkpointing_changes_no_gradient_of_a_mixer(options):
    gradients = []
    for checkpointing in (False, True):
        model = randomize(LanguageModel(tiny_config(**options), activation_checkpointing=checkpointing))
        model(random_tokens(23)).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


# ---- the registries -----------------------------------------------------------------------------------------------------------


def test_every_kind_and_decay_that_a_config_may_name_is_there():
    assert tuple(MIXERS) == KINDS
    assert set(DECAYS) == set(STEP_AXES)


@pytest.mark.parametrize("kind", MIXERS)
def test_a_mixer_owns_no_parameter_itself(kind):
    """ZeRO-3 gathers what a module owns when the module is called; a mixer's steps are called one by one."""
    mixer = fresh_mixer(tiny_config(kind=kind))
    assert not list(mixer.parameters(recurse=False))


def test_maps_of_queries_and_keys_are_two():
    mixer = fresh_mixer(tiny_config(kind="hedgehog"))
    assert isinstance(mixer.query_map, HedgehogMap) and isinstance(mixer.key_map, HedgehogMap)
    assert mixer.query_map.weight is not mixer.key_map.weight
