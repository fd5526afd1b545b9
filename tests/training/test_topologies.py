"""Every way to cut a run over processes is the same computation."""

import numpy as np
import pytest

from tests.training.conftest import OFFLOAD, ZERO
from tests.training.runs import GLOBAL_BATCH_SIZE, SEQ_LEN, STEPS, checkpoint_at, curve, measured, state_of
from tests.worlds import tiered

COMPARED_STEPS = 10
TOLERANCE = 1e-4  # sums are taken in another order, and AdamW enlarges what that changes: 1e-6 after ten steps where nothing is wrong


@pytest.fixture
def same_as_one_process(made):
    """A function that checks a run against ZeRO 1 on one process."""

    def check(name, tolerance=TOLERANCE):
        for key in ("loss", "grad_norm"):
            mine, reference = (curve(made(run), key)[:COMPARED_STEPS] for run in (name, "zero1"))
            assert len(mine) == len(reference) == COMPARED_STEPS
            np.testing.assert_allclose(mine, reference, rtol=0, atol=tolerance, err_msg=key)

    return check


@pytest.mark.parametrize("name", ["zero0", "zero2", "zero3", *OFFLOAD])
def test_zero_stages_and_offload_follow_one_curve(name, same_as_one_process):
    same_as_one_process(name)


@pytest.mark.parametrize("name", [f"{zero}-{kind}" for zero in ZERO for kind in ("dp2", "tp2")])
def test_two_processes_follow_the_curve_of_one(name, same_as_one_process):
    same_as_one_process(name)


def test_recomputed_activations_change_nothing(same_as_one_process):
    same_as_one_process("recomputing", tolerance=1e-6)  # the same operations in the same order, run twice


def test_training_learns(made):
    loss = curve(made("zero1"), "loss")
    assert loss[-1] < loss[0] - 0.5


@pytest.mark.parametrize(
    "name", tiered("zero1-tp2", *(f"{zero}-tp2-long" for zero in ("zero0", "zero2", "zero3")), slow=("zero0", "zero2", "zero3"))
)
def test_tp2_ends_with_the_second_moments_of_one_process(name, made):
    mine, reference = (state_of(checkpoint_at(made(run), STEPS)) for run in (name, "zero1"))
    for tensor in (tensor for tensor in mine if tensor.endswith("exp_avg_sq")):
        # they are sums of squares, so a gradient that is wrong at any step or place shows; 1e-12: gradients that are 0 but for rounding
        assert (mine[tensor] - reference[tensor]).norm() <= 1e-3 * reference[tensor].norm() + 1e-12, tensor


def test_a_run_may_change_topology_at_every_restart(made):
    """ZeRO 3 on one process to step 6, ZeRO 1 on two to 13, ZeRO 2 with tp_size 2 to the end: as if never interrupted."""
    run = made("moving-end")
    np.testing.assert_allclose(curve(run, "loss"), curve(made("zero1"), "loss"), rtol=0, atol=TOLERANCE)
    tokens_per_step = GLOBAL_BATCH_SIZE * SEQ_LEN
    assert [line["tokens"] for line in measured(run, "train")] == [tokens_per_step * step for step in range(1, STEPS + 1)]
    assert checkpoint_at(run, STEPS).record["progress"]["updates"] == STEPS
