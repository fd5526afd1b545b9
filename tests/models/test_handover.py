"""From stage 1 to stage 2 nothing changes: in fp64 to the last digits, in fp32 within the limit that is checked before every run.

And the check notices what is wrong: a tap, a gate, a rate.
"""

import dataclasses
import itertools
import weakref

import pytest
import torch

from megahedge.config.mixer import STEP_AXES, MixerConfig
from megahedge.config.model import ModelConfig
from megahedge.models import handover
from megahedge.models.handover import (
    MAX_PROBE_KL,
    added_parameters,
    either_source,
    make_probe,
    parameter_names,
    probe_divergence,
    stream_logits,
)
from megahedge.models.language_model import LanguageModel
from megahedge.models.mixers import MIXERS
from megahedge.models.mixers.hedge_mamba import GATE_OFFSET
from megahedge.parallel.initialize import fresh_values
from megahedge.parallel.sharding import load_parameters
from tests.models.small import SINGLE, random_tokens, randomize, small_config

DECAY_STEPS = [("none", "head"), *((structure, axis) for structure, axes in STEP_AXES.items() for axis in axes)]
BOTH = (False, True)


@dataclasses.dataclass
class Held:
    """Tensors by name: a Source."""

    tensors: dict[str, torch.Tensor]

    def __contains__(self, name):
        return name in self.tensors

    def read(self, name, index=None):
        return self.tensors[name] if index is None else self.tensors[name][index]


def held(model: LanguageModel) -> Held:
    return Held({name: parameter.detach() for name, parameter in model.named_parameters()})


def handed_over(config: ModelConfig, source: Held, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """A model of `config` as stage 2 starts it: what the source has, and fresh values for the rest."""
    model = LanguageModel(config).to(dtype)
    load_parameters(model, either_source(source, fresh_values(model, 0)), SINGLE)
    return model


def hedgehog(dtype: torch.dtype = torch.float32, sizes: dict | None = None, **options) -> LanguageModel:
    """A stage-1 model with random parameters, feature maps included."""
    return randomize(LanguageModel(small_config(**(sizes or {}), mixer=MixerConfig(kind="hedgehog", **options))).to(dtype))


# ---- equality -----------------------------------------------------------------------------------------------------------------

TINY = dict(vocab_size=23, hidden_size=8, num_heads=2, intermediate_size=8, rotary_pct=0.5)


@pytest.mark.parametrize(("structure", "axis"), DECAY_STEPS)
@pytest.mark.parametrize("rope", ["before", "after"])
def test_in_fp64_stage_2_starts_as_the_function_that_stage_1_learnt(structure, axis, rope):
    """Every combination of the switches."""
    tokens = random_tokens(23, batch=1, seq_len=9)
    decays = [dict(decay="none")] if structure == "none" else []
    decays = decays or [
        dict(decay=structure, decay_step=axis, decay_per_head=per_head, decay_tie_signs=tied)
        for per_head, tied in itertools.product(BOTH, BOTH)
    ]
    for per_head_maps in BOTH:
        before = hedgehog(torch.float64, TINY, rope=rope, feature_map_per_head=per_head_maps)
        source = held(before)
        with torch.no_grad():
            expected = before(tokens)
            for decay, taps, gate, bypass in itertools.product(decays, (4, 0), BOTH, BOTH):
                others = dict(conv_kernel=taps, gate=gate, bypass=bypass)
                mixer = dataclasses.replace(before.config.mixer, kind="hedge_mamba", **others, **decay)
                student = handed_over(before.config.with_mixer(mixer), source, torch.float64)
                # a float64 bound, far above its rounding (4e-15 measured) and far below fp32's
                assert (student(tokens) - expected).abs().max() <= 1e-9, mixer


@pytest.mark.parametrize(("structure", "axis"), DECAY_STEPS)
@pytest.mark.parametrize("rope", ["before", "after"])
def test_in_fp32_the_divergence_is_far_below_the_limit(structure, axis, rope):
    before = hedgehog(rope=rope)
    source = held(before)
    mixer = dataclasses.replace(before.config.mixer, kind="hedge_mamba", decay=structure, decay_step=axis)
    probe = make_probe(before.config, random_tokens(97, seq_len=48), source.read)
    divergence = probe_divergence(handed_over(before.config.with_mixer(mixer), source), **probe)
    assert 0 <= divergence <= MAX_PROBE_KL / 100  # 6e-14 and less measured


def test_bf16_parameters_are_exact_at_the_start():
    """Training in bf16 starts from what the fp32 check has passed: no identity value needs more digits than bf16 has."""
    source = held(hedgehog())
    mixer = MixerConfig(kind="hedge_mamba", bypass=True)
    student = handed_over(small_config(mixer=mixer), source)
    for name in added_parameters(student.config, "hedgehog"):
        parameter = student.get_parameter(name).detach()
        if name.endswith("step.down_weight"):  # any value is an identity here
            continue
        assert torch.equal(parameter.bfloat16().float(), parameter), name


# ---- the mutants --------------------------------------------------------------------------------------------------------------


def shift_last_tap(student: LanguageModel) -> None:
    weight = student.blocks[0].mixer.conv.weight
    weight.zero_()
    weight[:, -2] = 1.0


def gate_bias_of(value: float):
    def change(student: LanguageModel) -> None:
        student.blocks[0].mixer.gate_proj.bias.fill_(value - GATE_OFFSET)

    return change


def one_rate(student: LanguageModel) -> None:
    student.blocks[0].mixer.decay.rate.weight.view(-1)[0] = 1e-3


def all_rates(student: LanguageModel) -> None:
    student.blocks[0].mixer.decay.rate.weight.fill_(1e-3)


MUTANTS = {
    "the last tap moved by one": shift_last_tap,
    "a gate bias of 1.0": gate_bias_of(1.0),
    "a gate bias rounded to bf16": gate_bias_of(torch.tensor(GATE_OFFSET).bfloat16().item()),
    "one rate of 1e-3": one_rate,
    "the rates of one layer 1e-3": all_rates,
}


def steep() -> LanguageModel:
    """A stage-1 model whose signed normalisers come near 0: steep maps make one feature nearly 1, whose rotation decides the sign."""
    model = randomize(hedgehog(sizes=dict(rotary_pct=1.0)), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_map.weight"):
                parameter *= 30
    return model


def test_a_start_that_fp32_cannot_judge_is_judged_in_fp64():
    before = steep()
    student = handed_over(before.config.with_mixer(MixerConfig(kind="hedge_mamba")), held(before))
    probe = make_probe(before.config, random_tokens(97, seq_len=128), held(before).read)
    assert handover._divergence(student, **probe) > 5 * MAX_PROBE_KL  # 6e-8 measured: rounding, nothing else
    parameters = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    assert probe_divergence(student, **probe) <= MAX_PROBE_KL / 1000  # 1e-14, what fp32 leaves of the probe's own logits
    for name, parameter in student.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, parameters[name]) and hasattr(parameter, "shard_spec")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_there_too_the_check_notices_a_fault(mutant):
    before = steep()
    student = handed_over(before.config.with_mixer(MixerConfig(kind="hedge_mamba")), held(before))
    probe = make_probe(before.config, random_tokens(97, seq_len=128), held(before).read)
    with torch.no_grad():
        MUTANTS[mutant](student)
    assert probe_divergence(student, **probe) > 100 * MAX_PROBE_KL  # 1e-2 and more measured: what magnifies rounding magnifies faults


@pytest.mark.parametrize("decay", ["head", "state", "channel"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_check_notices_a_fault_in_one_layer(mutant, decay):
    before = hedgehog()
    source = held(before)
    axis = STEP_AXES[decay][0]
    mixer = dataclasses.replace(before.config.mixer, kind="hedge_mamba", decay=decay, decay_step=axis)
    student = handed_over(before.config.with_mixer(mixer), source)
    probe = make_probe(before.config, random_tokens(97, seq_len=128), source.read)
    with torch.no_grad():
        MUTANTS[mutant](student)
    # measured: tap 1e-2, gate 5e-3, rounded gate 5e-7, one rate 4e-6 (head), 2e-7 (state), 1.2e-8 (channel)
    assert probe_divergence(student, **probe) > MAX_PROBE_KL


def test_a_probe_of_the_wrong_model_is_noticed():
    source, other = held(hedgehog()), held(randomize(hedgehog(), seed=1))
    probe = make_probe(small_config(mixer=MixerConfig(kind="hedgehog")), random_tokens(97), source.read)
    student = handed_over(small_config(mixer=MixerConfig(kind="hedge_mamba")), other)
    assert probe_divergence(student, **probe) > 0.1


def test_the_divergence_leaves_the_models_mode_alone():
    model = hedgehog()
    probe = make_probe(model.config, random_tokens(97), held(model).read)
    for training in BOTH:
        model.train(training)
        assert probe_divergence(model, **probe) == pytest.approx(0, abs=MAX_PROBE_KL)
        assert model.training == training


# ---- logits from tensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize(("parallel_residual", "tied"), [(True, False), (False, False), (True, True)])
def test_streamed_logits_are_the_models(kind, parallel_residual, tied):
    config = small_config(parallel_residual=parallel_residual, tie_word_embeddings=tied, mixer=MixerConfig(kind=kind))
    model = randomize(LanguageModel(config))
    tokens = random_tokens(97)
    with torch.no_grad():
        assert torch.equal(stream_logits(config, held(model).read, tokens), model(tokens))


def test_streaming_reads_each_tensor_by_the_name_that_the_model_gives_it():
    model = hedgehog()
    asked = []

    def read(name):
        asked.append(name)
        return model.get_parameter(name)

    stream_logits(model.config, read, random_tokens(97))
    assert sorted(asked) == sorted(parameter_names(model.config)) == sorted(name for name, _ in model.named_parameters())


def test_streaming_holds_one_layer_at_a_time(monkeypatch):
    alive, there_already = weakref.WeakSet(), []

    class Watched(handover.Block):
        def __init__(self, *arguments):
            there_already.append(len(alive))
            super().__init__(*arguments)
            alive.add(self)

    monkeypatch.setattr(handover, "Block", Watched)
    model = hedgehog(sizes=dict(num_layers=4))
    stream_logits(model.config, held(model).read, random_tokens(97))
    assert there_already == [0, 0, 0, 0]


# ---- names and sources --------------------------------------------------------------------------------------------------------


def test_what_each_stage_adds():
    config = small_config(num_layers=1, mixer=MixerConfig(kind="hedge_mamba"))
    mixer = "blocks.0.mixer"
    maps = {f"{mixer}.{part}_map.{kind}" for part in ("query", "key") for kind in ("weight", "bias")}
    step = {f"{mixer}.decay.step.{part}_{kind}" for part in ("down", "up") for kind in ("weight", "bias")}
    others = {f"{mixer}.{part}.{kind}" for part in ("conv", "gate_proj") for kind in ("weight", "bias")}
    assert added_parameters(config, "hedgehog") == step | others | {f"{mixer}.decay.rate.weight"}
    assert added_parameters(config, "softmax") == added_parameters(config, "hedgehog") | maps
    assert added_parameters(config, "hedge_mamba") == set()
    bare = MixerConfig(kind="hedge_mamba", decay="none", conv_kernel=0, gate=False)
    assert added_parameters(config.with_mixer(bare), "hedgehog") == set()
    bypassed = config.with_mixer(dataclasses.replace(bare, bypass=True))
    assert added_parameters(bypassed, "hedgehog") == {f"{mixer}.bypass_proj.{kind}" for kind in ("weight", "bias")}


def test_a_mamba_has_nothing_of_what_was_there_before():
    """No name that a teacher or a stage 1 has: all would be read from there, and none be trained at the rate of what is new."""
    config = small_config(mixer=MixerConfig(kind="mamba"))
    own = {name for name in parameter_names(config) if ".mixer." in name}
    assert len(own) == 2 * 13
    assert added_parameters(config, "softmax") == added_parameters(config, "hedgehog") == own
    teacher = held(randomize(LanguageModel(small_config())))
    student = handed_over(config, teacher)
    fresh = fresh_values(student, 0)
    for name, parameter in student.named_parameters():
        assert torch.equal(parameter, fresh(name) if name in own else teacher.read(name)), name


def test_either_source_prefers_what_is_given():
    given = Held({"there": torch.arange(4.0)})

    def fresh(name, index=()):
        return torch.full((4,), -1.0)[index]

    read = either_source(given, fresh)
    assert read("there").tolist() == [0, 1, 2, 3]
    assert read("there", (slice(1, 3),)).tolist() == [1, 2]
    assert read("missing").tolist() == [-1] * 4
    assert read("missing", (slice(1, 3),)).tolist() == [-1] * 2
