"""Stage 1 compares each layer of the student with the teacher's, and trains the feature maps alone."""

import itertools
import weakref

import pytest
import torch

from megahedge.config.mixer import MixerConfig
from megahedge.config.options import Stage1Options
from megahedge.distill import alignment
from megahedge.distill.alignment import layer_losses
from megahedge.distill.losses import LOSSES
from megahedge.kernels import DenominatorStats
from megahedge.models.context import SequenceContext
from megahedge.models.language_model import LanguageModel
from megahedge.stages.stage1 import Stage1
from tests.models.small import SINGLE, random_tokens, randomize, small_config, train_feature_maps_only
from tests.training.runs import ds_config

INPUTS, TARGETS, BOTH = ("student", "teacher"), ("block", "mixer"), (True, False)
TOKENS = random_tokens(97)
FORMS = list(itertools.product(INPUTS, TARGETS, BOTH))
# the same sums in another order in fp64
TOLERANCE = 1e-12


def student_of(parallel_residual: bool = True, checkpointing: bool = False, **options) -> LanguageModel:
    """Three layers, random parameters, all but the feature maps frozen; fp64."""
    config = small_config(parallel_residual=parallel_residual, num_layers=3, mixer=MixerConfig(kind="hedgehog", **options))
    return train_feature_maps_only(randomize(LanguageModel(config, activation_checkpointing=checkpointing).double()))


def teacher_of(student: LanguageModel) -> LanguageModel:
    """The softmax model with the student's other parameters."""
    teacher = LanguageModel(student.config.with_mixer(MixerConfig())).double().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            parameter.copy_(student.get_parameter(name))
    return teacher


def plain_losses(student: LanguageModel, inputs: str, targets: str, loss: str) -> torch.Tensor:
    """Every layer's loss from two models that share nothing, one after the other, with hooks on blocks and mixers."""
    teacher, context = teacher_of(student), SequenceContext.of(TOKENS, student.config)
    taught = learnt = student.embedding(TOKENS)
    losses = []
    for block, teacher_block in zip(student.blocks, teacher.blocks, strict=True):
        fed = learnt if inputs == "student" else taught
        taught, taught_mixed = run_block(teacher_block, taught, context)
        learnt, learnt_mixed = run_block(block, fed, context)
        pair = (learnt_mixed, taught_mixed) if targets == "mixer" else (learnt, taught)
        losses.append(LOSSES[loss](*pair))
    return torch.stack(losses)


def run_block(block, hidden, context) -> tuple[torch.Tensor, torch.Tensor]:
    mixed = []
    hook = block.mixer.out_proj.register_forward_hook(lambda module, arguments, output: mixed.append(output[0] + output[1]))
    output = block(hidden, context)
    hook.remove()
    return output, mixed[0]


def gradients_of(student: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in student.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("inputs", "targets", "parallel"), FORMS)
@pytest.mark.parametrize("loss", LOSSES)
def test_layer_losses_are_those_of_two_models_run_apart(inputs, targets, parallel, loss):
    """And so are the gradients: what teacher and student share is computed once, not differently."""
    mine, plain = student_of(parallel), student_of(parallel)
    losses, expected = layer_losses(mine, TOKENS, inputs, targets, loss), plain_losses(plain, inputs, targets, loss)
    torch.testing.assert_close(losses, expected, rtol=TOLERANCE, atol=0)
    losses.sum().backward()
    expected.sum().backward()
    found, wanted = gradients_of(mine), gradients_of(plain)
    assert found.keys() == wanted.keys()
    scale = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    assert all((found[name] - wanted[name]).norm() <= TOLERANCE * scale for name in wanted)


@pytest.mark.parametrize("parallel", BOTH)
def test_students_of_either_input_part_after_the_first_layer(parallel):
    by_student, by_teacher = (layer_losses(student_of(parallel), TOKENS, inputs, "block", "cosine") for inputs in INPUTS)
    torch.testing.assert_close(by_student[0], by_teacher[0], rtol=TOLERANCE, atol=0)
    assert (by_student[1:] - by_teacher[1:]).abs().min() > 1e-4


@pytest.mark.parametrize(("inputs", "parallel"), itertools.product(INPUTS, BOTH))
def test_the_teachers_stream_is_the_softmax_models(monkeypatch, inputs, parallel):
    """The last block's target, after the final norm, is the hidden state of the softmax model."""
    targets = []

    def record(student, teacher):
        targets.append(teacher)
        return (student - teacher).square().sum()

    monkeypatch.setitem(LOSSES, "recorded", record)
    student = student_of(parallel)
    layer_losses(student, TOKENS, inputs, "block", "recorded")
    expected = teacher_of(student).hidden_states(TOKENS)
    assert (student.final_norm(targets[-1]) - expected).norm() <= TOLERANCE * expected.norm()
    assert not any(target.requires_grad for target in targets)


@pytest.mark.parametrize(("inputs", "targets", "parallel"), FORMS)
@pytest.mark.parametrize("per_head", BOTH)
def test_gradients_reach_the_feature_maps_and_nothing_else(inputs, targets, parallel, per_head):
    student = student_of(parallel, feature_map_per_head=per_head)
    layer_losses(student, TOKENS, inputs, targets, "cosine").sum().backward()
    expected = {f"blocks.{index}.mixer.{part}_map.{kind}" for index in range(3) for part in ("query", "key") for kind in ("weight", "bias")}
    gradients = gradients_of(student)
    assert set(gradients) == expected
    assert all(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(("targets", "parallel"), itertools.product(TARGETS, BOTH))
def test_a_teacher_fed_layer_teaches_its_own_maps_alone(targets, parallel):
    student = student_of(parallel)
    layer_losses(student, TOKENS, "teacher", targets, "cosine")[1].backward()
    assert {name.split(".")[1] for name, gradient in gradients_of(student).items() if gradient.any()} == {"1"}


@pytest.mark.parametrize(("inputs", "targets", "parallel"), FORMS)
def test_activation_checkpointing_changes_no_gradient(inputs, targets, parallel):
    plain, checkpointed = (student_of(parallel, checkpointing) for checkpointing in (False, True))
    for student in (plain, checkpointed):
        layer_losses(student, TOKENS, inputs, targets, "cosine").sum().backward()
    expected, found = gradients_of(plain), gradients_of(checkpointed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(("inputs", "targets", "parallel"), FORMS)
def test_no_logits_are_made(monkeypatch, inputs, targets, parallel):
    student = student_of(parallel)

    def refuse(*arguments):
        pytest.fail("the head was called")

    monkeypatch.setattr(student.lm_head, "forward", refuse)
    layer_losses(student, TOKENS, inputs, targets, "cosine")


@pytest.mark.parametrize("targets", TARGETS)
def test_teacher_fed_layers_with_a_parallel_residual_project_once(targets):
    student = student_of()
    calls = []
    for block in student.blocks:
        for module in (block.mixer.qkv_proj, block.mlp):
            module.register_forward_hook(lambda module, *_: calls.append(module))
    layer_losses(student, TOKENS, "teacher", targets, "cosine")
    assert len(calls) == len(set(calls)) == 2 * 3


@pytest.mark.parametrize(("inputs", "targets", "parallel"), FORMS)
@pytest.mark.parametrize("rope", ["before", "after"])
def test_every_normaliser_is_counted_once(inputs, targets, parallel, rope):
    stats = DenominatorStats()
    layer_losses(student_of(parallel, rope=rope), TOKENS, inputs, targets, "cosine", stats)
    assert stats.total == TOKENS.numel() * 4 * 3  # heads, layers
    if rope == "before":
        assert int(stats.negative) == int(stats.clamped) == 0


@pytest.mark.parametrize("per_head", BOTH)
def test_stage_1_trains_exactly_the_feature_maps(per_head):
    config = small_config(mixer=MixerConfig(kind="hedgehog", feature_map_per_head=per_head))
    stage = Stage1(config, SINGLE, Stage1Options(ds_config=ds_config("zero1"), feature_map_per_head=per_head))
    expected = train_feature_maps_only(LanguageModel(config))
    assert {name for name, parameter in stage.student.named_parameters() if parameter.requires_grad} == {
        name for name, parameter in expected.named_parameters() if parameter.requires_grad
    }


@pytest.mark.parametrize(("inputs", "targets", "parallel"), FORMS)
def test_packed_documents_are_compared_as_if_each_stood_alone(inputs, targets, parallel):
    """Losses are means over tokens, and documents of a row see nothing of each other."""
    tokens, lengths = TOKENS[:1], (5, 1, 7)
    boundaries = torch.zeros_like(tokens, dtype=torch.bool)
    boundaries[0, list(itertools.accumulate(lengths))[:-1]] = True
    student = student_of(parallel)
    packed = layer_losses(student, tokens, inputs, targets, "cosine", boundaries=boundaries)
    alone = torch.stack([layer_losses(student, part, inputs, targets, "cosine") for part in tokens.split(lengths, dim=1)])
    expected = (alone * torch.tensor(lengths).unsqueeze(1)).sum(0) / sum(lengths)
    torch.testing.assert_close(packed, expected, rtol=1e-10, atol=0)
    assert (layer_losses(student, tokens, inputs, targets, "cosine") - packed).abs().min() > 1e-6


class Saved:
    """A tensor that a graph has saved."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


@pytest.mark.parametrize(("targets", "parallel"), itertools.product(TARGETS, BOTH))
def test_teacher_fed_layers_keep_no_graph(targets, parallel):
    """Of all that was saved for gradients, what is left before the backward is a layer's gradients."""
    kept = {}
    for inputs in INPUTS:
        alive = weakref.WeakSet()

        def pack(tensor, alive=alive):
            saved = Saved(tensor)
            alive.add(saved)
            return saved

        student = student_of(parallel)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            losses = layer_losses(student, TOKENS, inputs, targets, "cosine")
        kept[inputs] = sum(saved.tensor.numel() for saved in alive)
        losses.sum().backward()
    trained = sum(parameter.numel() for parameter in student.parameters() if parameter.requires_grad)
    assert kept["teacher"] == trained
    assert kept["student"] > 10 * trained


@pytest.mark.parametrize("parallel", BOTH)
def test_gradients_made_within_autocast_are_not_rounded_by_it(parallel):
    """As ZeRO stage 0 runs bf16; feature maps and losses are fp32 in it, and so are their gradients."""
    gradients = {}
    for inputs in ("teacher", "plain"):
        student = student_of(parallel).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = layer_losses(student, TOKENS, "teacher", "block", "cosine") if inputs == "teacher" else losses_later(student)
        losses.sum().backward()
        gradients[inputs] = gradients_of(student)
    for name, expected in gradients["plain"].items():
        torch.testing.assert_close(gradients["teacher"][name], expected, rtol=1e-5, atol=1e-7)


def losses_later(student: LanguageModel) -> torch.Tensor:
    """The same with one backward for all layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment, "_with_gradients_of_its_own", lambda loss, block: loss)
        return layer_losses(student, TOKENS, "teacher", "block", "cosine")
