"""TP = 2 and 4 are TP = 1: losses of all stages, every gradient, the parameters after a step.

One gloo world of four runs the whole matrix.
"""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megahedge.config.mixer import STEP_AXES, MixerConfig
from megahedge.distill.alignment import layer_losses
from megahedge.models import block, norms
from megahedge.models.hf_weights import load_pretrained, save_pretrained
from megahedge.models.language_model import LanguageModel
from megahedge.models.mixers import MIXERS, decay, feature_maps, hedge_mamba
from megahedge.parallel import layers
from megahedge.parallel.collectives import all_reduce, reduce_from_tp
from megahedge.parallel.loss import IGNORE_INDEX, vocab_parallel_cross_entropy, vocab_parallel_kl, vocab_parallel_token_losses
from megahedge.parallel.sharding import ShardSpec, shard, shard_index, unshard
from megahedge.parallel.topology import TensorParallel, Topology
from megahedge.utils.errors import InputError
from tests.distributed import run_distributed
from tests.models.small import SINGLE, random_tokens, randomize, small_config, train_feature_maps_only

# fp32 sums in another order; a missing or doubled reduce gives 1e-2 and more
RELATIVE_TOLERANCE = 1e-5
LEARNING_RATE = 0.5
TP_SIZES = (2, 4)

MODEL_FORMS = {
    f"{kind}, {'parallel' if parallel else 'sequential'} residual, {'tied' if tied else 'untied'}": dict(
        mixer=MixerConfig(kind=kind), parallel_residual=parallel, tie_word_embeddings=tied
    )
    for kind, parallel, tied in itertools.product(MIXERS, (True, False), (False, True))
} | {
    "activation checkpointing": dict(activation_checkpointing=True),
    "activation checkpointing of hedge_mamba": dict(
        activation_checkpointing=True, mixer=MixerConfig(kind="hedge_mamba", decay="state", decay_step="state")
    ),
    "no attention biases": dict(attention_bias=False, rotary_pct=1.0),
    "vocabulary that leaves a rank nothing but padding": dict(vocab_size=5),
}


def decays() -> list[dict]:
    """Every structure with every axis of its step, shared by the heads or not, signs tied or not."""
    switches = [dict(decay_per_head=per_head, decay_tie_signs=tied) for per_head, tied in itertools.product((False, True), repeat=2)]
    pairs = [(structure, axis) for structure, axes in STEP_AXES.items() for axis in axes]
    return [dict(decay="none")] + [dict(decay=structure, decay_step=axis, **switch) for structure, axis in pairs for switch in switches]


def mixer_forms() -> dict[str, dict]:
    """Each decay once, with the other switches of the mixer going round beside it."""
    forms = {}
    others = itertools.cycle(itertools.product(("after", "before"), (False, True), (4, 0), (True, False), (False, True)))
    for options in decays():
        rope, per_head, taps, gate, bypass = next(others)
        switches = dict(feature_map_per_head=per_head, feature_map_scale=per_head, conv_kernel=taps, gate=gate, bypass=bypass)
        options = options | dict(rope=rope) | switches
        name = " ".join(str(value) for value in options.values())
        forms[f"hedge_mamba {name}"] = dict(mixer=MixerConfig(kind="hedge_mamba", **options), **MIXER_SIZES)
        next(others)
        next(others)  # a stride that shares no factor with their number goes through all values of each
    return forms


MIXER_SIZES = dict(hidden_size=32, intermediate_size=32)
FORMS = MODEL_FORMS | mixer_forms()
ALIGNMENTS = {
    f"{inputs}-fed, {targets}, {'parallel' if parallel else 'sequential'}, {'per-head' if per_head else 'shared'} maps": dict(
        alignment=(inputs, targets),
        parallel_residual=parallel,
        mixer=MixerConfig(kind="hedgehog", feature_map_per_head=per_head, rope="before" if per_head else "after"),
        activation_checkpointing=per_head,
    )
    for inputs, targets, parallel, per_head in itertools.product(("student", "teacher"), ("block", "mixer"), (True, False), (False, True))
}


def bias_on_every_rank(partial, biases, tensor_parallel):
    """The classical fault: the bias is part of each partial sum."""
    return reduce_from_tp(partial + sum(bias for bias in biases if bias is not None), tensor_parallel)


def no_copy(tensor, tensor_parallel):
    return tensor


def no_copies(*parameters, tensor_parallel):
    return parameters


MUTANTS = {
    "bias added on every rank": (block, "reduce_partial_sums", bias_on_every_rank),
    "gradient of the block's input not reduced": (block, "copy_to_tp", no_copy),
    "gradient of the head's input not reduced": (layers, "copy_to_tp", no_copy),
    "gradients of the norms not reduced": (norms, "copy_parameters_to_tp", no_copies),
    "partial sums not reduced": (layers, "reduce_from_tp", no_copy),
    "gradients of shared feature maps not reduced": (feature_maps, "copy_parameters_to_tp", no_copies),
    "gradients of a shared decay not reduced": (decay, "copy_parameters_to_tp", no_copies),
    "gradients of the convolution not reduced": (hedge_mamba, "copy_parameters_to_tp", no_copies),
}
MUTATED = dict(mixer=MixerConfig(kind="hedge_mamba"))


# ---- in the ranks


def build(tensor_parallel: TensorParallel, activation_checkpointing=False, alignment=None, **changes) -> LanguageModel:
    model = randomize(LanguageModel(small_config(**changes), tensor_parallel, activation_checkpointing))
    return train_feature_maps_only(model) if alignment else model


def losses_after_backward(model: LanguageModel, alignment: tuple[str, str] | None) -> torch.Tensor:
    """The cross-entropy, or every layer's loss of stage 1."""
    tokens = random_tokens(model.config.vocab_size, batch=3, seq_len=14)
    if alignment is None:
        labels = tokens[:, 1:].clone()
        labels[0, :4] = IGNORE_INDEX
        losses = vocab_parallel_cross_entropy(model(tokens[:, :-1]), labels, model.config.vocab_size, model.tensor_parallel)
    else:
        losses = layer_losses(model, tokens, *alignment, "cosine_mse")
    losses.sum().backward()
    return losses.detach()


@torch.no_grad()
def sgd_step(model: LanguageModel) -> None:
    for parameter in trainable(model).values():
        parameter.sub_(LEARNING_RATE * parameter.grad)


def trainable(model: LanguageModel) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def stepped(tensor_parallel: TensorParallel, form: dict) -> tuple[LanguageModel, torch.Tensor]:
    """A model after one step of SGD, its gradients kept, and the losses before the step."""
    model = build(tensor_parallel, **form)
    losses = losses_after_backward(model, form.get("alignment"))
    sgd_step(model)
    return model, losses


def gather(piece: torch.Tensor, spec: ShardSpec, tensor_parallel: TensorParallel) -> torch.Tensor:
    """The full tensor from all ranks' pieces."""
    pieces = [torch.empty_like(piece) for _ in range(tensor_parallel.size)]
    dist.all_gather(pieces, piece.contiguous(), group=tensor_parallel.group)
    if spec.dim is None:
        assert all(torch.equal(pieces[0], other) for other in pieces), "a replicated tensor differs between ranks"
    return unshard(pieces, spec)


def compare_with_one_rank(tensor_parallel: TensorParallel, form: dict, one_rank: tuple) -> dict[str, float]:
    """Difference of the losses, and the largest over parameters of ‖Δgradient‖ and ‖Δparameter after a step‖, over ‖gradients of all‖."""
    (reference, expected_losses), (model, losses) = one_rank, stepped(tensor_parallel, form)
    worst = {"loss": (losses - expected_losses).abs().max().item(), "gradient": 0.0, "parameter": 0.0}
    expected_parameters = trainable(reference)
    scale = torch.stack([parameter.grad.norm() for parameter in expected_parameters.values()]).norm()
    for name, parameter in trainable(model).items():
        expected, spec = expected_parameters[name], parameter.shard_spec
        for kind, ours, theirs in (("gradient", parameter.grad, expected.grad), ("parameter", parameter.data, expected.data)):
            difference = (gather(ours, spec, tensor_parallel) - theirs).norm() / scale
            worst[kind] = max(worst[kind], difference.item())
    return worst


def mutant_difference(tensor_parallel: TensorParallel, one_rank: tuple, module, attribute: str, replacement) -> float:
    """The largest measure that the comparison gives with one collective wrong; infinite where even replicas part."""
    with mock.patch.object(module, attribute, replacement):
        try:
            return max(compare_with_one_rank(tensor_parallel, MUTATED, one_rank).values())
        except AssertionError:
            return float("inf")


def loss_differences(tensor_parallel: TensorParallel, vocab_size: int, dtype: torch.dtype) -> dict[str, float]:
    """Values and local gradients of both losses against one rank's, as the largest absolute difference."""
    generator = torch.Generator().manual_seed(vocab_size)
    student, teacher = (4 * torch.randn(2, 2, 9, vocab_size, generator=generator)).to(dtype)
    labels = torch.randint(0, vocab_size, (2, 9), generator=generator)
    labels[1, 2:5] = IGNORE_INDEX
    spec = ShardSpec(2, tuple(student.shape))
    # padding holds rubbish, as an embedding's padded rows may come to
    local_student, local_teacher = (
        shard(full, spec, tensor_parallel.rank, tensor_parallel.size).masked_fill(
            shard(torch.ones_like(full), spec, tensor_parallel.rank, tensor_parallel.size) == 0, 50.0
        )
        for full in (student, teacher)
    )
    losses = {
        "cross-entropy": lambda s, t, group: vocab_parallel_token_losses(s, labels, vocab_size, group),
        "kl": lambda s, t, group: vocab_parallel_kl(t, s, vocab_size, group, temperature=2.0),
    }
    worst = {}
    for name, loss in losses.items():
        full, local = student.clone().requires_grad_(), local_student.clone().requires_grad_()
        expected, ours = loss(full, teacher, SINGLE), loss(local, local_teacher, tensor_parallel)
        expected.sum().backward()
        ours.sum().backward()
        worst[f"{name} value"] = (ours - expected).abs().max().item()
        expected_gradient = shard(full.grad, spec, tensor_parallel.rank, tensor_parallel.size)
        worst[f"{name} gradient"] = (local.grad - expected_gradient).abs().max().item()
    return worst


def loads_its_slices(tensor_parallel: TensorParallel, folder: str) -> bool:
    model, whole = LanguageModel(small_config(), tensor_parallel), build(SINGLE)
    load_pretrained(model, folder)
    return all(
        torch.equal(parameter, shard(whole.get_parameter(name), parameter.shard_spec, tensor_parallel.rank, tensor_parallel.size))
        for name, parameter in model.named_parameters()
    )


def grid(topology: Topology) -> tuple:
    """Where this rank stands, and the sums of ranks that its groups give."""
    sums = []
    for group in (topology.mpu.get_tensor_model_parallel_group(), topology.mpu.get_data_parallel_group()):
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=group)
        sums.append(total.item())
    return topology.dp_rank, topology.tp_rank, *sums


def whole_matrix(folder: str) -> dict:
    try:
        Topology.create(3)
        refusal = None
    except InputError as error:
        refusal = str(error)
    results = {"refusal": refusal}
    forms = FORMS | ALIGNMENTS
    one_rank = {name: stepped(SINGLE, form) for name, form in forms.items()}
    unmutated = stepped(SINGLE, MUTATED)
    for tp_size in TP_SIZES:
        topology = Topology.create(tp_size)
        group = topology.tensor_parallel
        results[tp_size] = {
            "grid": grid(topology),
            "forms": {name: compare_with_one_rank(group, form, one_rank[name]) for name, form in forms.items()},
            "mutants": {name: mutant_difference(group, unmutated, *mutant) for name, mutant in MUTANTS.items()},
            "losses": {case: loss_differences(group, *case) for case in LOSS_CASES},
            "loads": loads_its_slices(group, folder),
            "maximum": all_reduce(torch.tensor(dist.get_rank()), group, dist.ReduceOp.MAX).item(),
        }
    return results


LOSS_CASES = tuple(itertools.product((97, 5, 8), (torch.float32, torch.bfloat16)))


# ---- in the test run


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("tp") / "hf"
    model = build(SINGLE)
    save_pretrained(model.named_parameters(), model.config, folder, torch.float32)
    return run_distributed(whole_matrix, 4, str(folder), timeout_seconds=600.0)


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_tp_step_equals_tp1_step(ranks, tp_size, form):
    for rank in ranks:
        worst = rank[tp_size]["forms"][form]
        assert worst["loss"] <= RELATIVE_TOLERANCE * 5  # losses are near 5 nats
        assert worst["gradient"] <= RELATIVE_TOLERANCE
        assert worst["parameter"] <= LEARNING_RATE * RELATIVE_TOLERANCE + 1e-6  # and the parameters' own rounding


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("form", ALIGNMENTS)
def test_stage_1_losses_and_gradients_equal_those_of_one_rank(ranks, tp_size, form):
    for rank in ranks:
        worst = rank[tp_size]["forms"][form]
        assert worst["loss"] <= RELATIVE_TOLERANCE  # losses are near 1
        assert worst["gradient"] <= RELATIVE_TOLERANCE


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_collective_is_noticed(ranks, tp_size, mutant):
    assert all(rank[tp_size]["mutants"][mutant] > 100 * RELATIVE_TOLERANCE for rank in ranks)


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("case", LOSS_CASES, ids=str)
def test_vocab_parallel_losses_equal_those_of_one_rank(ranks, tp_size, case):
    for rank in ranks:
        for name, difference in rank[tp_size]["losses"][case].items():
            # fp32 arithmetic on log-probabilities near 20 in either case (3e-6 measured); gradients are rounded to the logits' dtype
            assert difference <= (2**-8 if case[1] == torch.bfloat16 and "gradient" in name else 1e-5), name


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_ranks_load_their_slices_of_a_folder(ranks, tp_size):
    assert all(rank[tp_size]["loads"] for rank in ranks)


def test_tp_ranks_are_adjacent_and_groups_hold_the_right_ranks(ranks):
    assert [rank[2]["grid"] for rank in ranks] == [(0, 0, 1, 2), (0, 1, 1, 4), (1, 0, 5, 2), (1, 1, 5, 4)]
    assert [rank[4]["grid"] for rank in ranks] == [(0, number, 6, number) for number in range(4)]
    assert [rank[2]["maximum"] for rank in ranks] == [1, 1, 3, 3]


def test_tp_size_that_does_not_divide_the_world_is_refused(ranks):
    assert ranks[0]["refusal"] == "tp_size=3 does not divide the 4 processes of this job; use 1, 2 or 4"


def test_mpu_is_not_taken_for_sequence_parallelism():
    assert not hasattr(Topology.single().mpu, "initialize_sequence_parallel")


def test_shard_index_of_a_replicated_parameter_is_the_whole():
    assert shard_index(ShardSpec(None, (3, 2)), rank=1, size=4) == (slice(0, 3), slice(0, 2))
