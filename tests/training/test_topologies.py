"""Every way to cut a run over processes is the same computation."""

import numpy as np
import pytest

from tests.training.conftest import OFFLOAD, SKIPPED, ZERO
from tests.training.runs import SEQ_LEN, STEPS, checkpoint_at, curve, measured, state_of

COMPARED_STEPS = 10
TOLERANCE = 1e-4  # sums are taken in another order, and AdamW enlarges what that changes: 1e-6 after ten steps where nothing is wrong


@pytest.fixture
def same_as_one_process(inputs, two_processes):
    """A function that checks a run against ZeRO 1 on one process."""

    def check(name, tolerance=TOLERANCE):
        for key in ("loss", "grad_norm"):
            mine, reference = (curve(inputs / run, key)[:COMPARED_STEPS] for run in (name, "zero1"))
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


def test_training_learns(inputs, one_process):
    loss = curve(inputs / "zero1", "loss")
    assert loss[-1] < loss[0] - 0.5


@pytest.mark.parametrize("name", [f"{zero}-tp2" for zero in ZERO])
def test_tp2_ends_with_the_parameters_of_one_process(name, inputs, two_processes):
    mine, reference = (state_of(checkpoint_at(inputs / run, STEPS)) for run in (name, "zero1"))
    for tensor in (tensor for tensor in mine if tensor.startswith("optimizer") and tensor.endswith("exp_avg_sq")):
        assert (mine[tensor] - reference[tensor]).norm() <= 1e-3 * reference[tensor].norm() + 1e-12, tensor


def test_a_run_may_change_topology_at_every_restart(inputs, two_processes):
    """ZeRO 3 on one process to step 6, ZeRO 1 on two to 13, ZeRO 2 with tp_size 2 to the end: as if never interrupted."""
    np.testing.assert_allclose(curve(inputs / "moving", "loss"), curve(inputs / "zero1", "loss"), rtol=0, atol=TOLERANCE)
    assert [line["tokens"] for line in measured(inputs / "moving", "train")] == [8 * SEQ_LEN * step for step in range(1, STEPS + 1)]
    assert checkpoint_at(inputs / "moving", STEPS).record["progress"]["updates"] == STEPS


@pytest.mark.parametrize("name", [*(f"{zero}-poisoned" for zero in ZERO), "tp2-poisoned"])
def test_a_nan_on_one_rank_makes_all_ranks_skip_that_step_only(name, inputs, two_processes):
    run = inputs / name
    for step in SKIPPED:
        before, after = (checkpoint_at(run, number) for number in (step - 1, step))
        a, b = state_of(before), state_of(after)
        assert all(a[tensor].equal(b[tensor]) for tensor in a)
        assert before.record["progress"]["updates"] == after.record["progress"]["updates"]
    assert not np.isnan(curve(run, "loss"))[[index for index in range(6) if index + 1 not in SKIPPED]].any()
    assert np.isnan(curve(run, "loss")[[step - 1 for step in SKIPPED]]).all()
    assert [line["skipped"] for line in measured(run, "train")][:6] == [0, 0, 1, 1, 2, 2]
    moved = state_of(checkpoint_at(run, 6)), state_of(checkpoint_at(run, 5))
    assert not any(moved[0][tensor].equal(moved[1][tensor]) for tensor in moved[0])
    # until the first bad step the run is an ordinary one
    np.testing.assert_allclose(curve(run, "loss")[:2], curve(inputs / "zero1", "loss")[:2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [f"{zero}-poisoned" for zero in ZERO])
def test_training_recovers_after_skipped_steps(name, inputs, two_processes):
    loss = curve(inputs / name, "loss")
    assert loss[-1] < loss[0] - 0.5
    assert checkpoint_at(inputs / name, STEPS).record["progress"]["updates"] == STEPS - len(SKIPPED)


def test_ten_bad_steps_in_a_row_end_the_run_and_say_which_samples(inputs, two_processes):
    """Steps 4 to 13 are bad; of step 13's samples 96 … 103, those of rank 1's second micro-batch are named."""
    message = two_processes["all-bad"]
    assert message.startswith("10 steps in a row")
    assert "[102, 103]" in message
    assert {name for name, error in two_processes.items() if error} == {"all-bad"}


def test_a_full_disk_costs_one_checkpoint_and_not_the_run(inputs, two_processes):
    checkpoints = inputs / "disk-full" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-00000002", "step-00000006"]
    checkpoint_at(inputs / "disk-full", 2).verify()
    checkpoint_at(inputs / "disk-full", 6).verify()
    assert len(measured(inputs / "disk-full", "train")) == 6
