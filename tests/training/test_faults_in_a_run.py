"""What a run does when numbers or disks go bad: all ranks agree, and only what must be lost is lost."""

import json

import numpy as np
import pytest

from tests.training.conftest import FEW_STEPS, SKIPPED, ZERO
from tests.training.runs import STEPS, checkpoint_at, curve, measured, state_of
from tests.worlds import tiered


@pytest.mark.parametrize("name", tiered(*(f"{zero}-poisoned" for zero in ZERO), "tp2-poisoned", slow=("zero0", "zero2", "tp2")))
def test_a_nan_on_one_rank_makes_all_ranks_skip_the_update(name, made):
    """Steps 3 (NaN in the loss) and 4 (NaN in a gradient) leave parameters and moments of step 2 bit for bit."""
    before, skipped, after = (checkpoint_at(made(name), step) for step in (2, 4, 6))
    old, same, new = map(state_of, (before, skipped, after))
    assert all(old[tensor].equal(same[tensor]) for tensor in old)
    assert not any(old[tensor].equal(new[tensor]) for tensor in old)
    assert [checkpoint.record["progress"]["updates"] for checkpoint in (before, skipped, after)] == [2, 2, 4]


@pytest.mark.parametrize("name", tiered(*(f"{zero}-poisoned" for zero in ZERO), "tp2-poisoned", slow=("zero0", "zero2", "tp2")))
def test_skipped_steps_are_counted_and_training_goes_on(name, made):
    loss = curve(made(name), "loss")
    bad_loss, bad_gradient = SKIPPED
    assert [index + 1 for index in range(len(loss)) if np.isnan(loss[index])] == [bad_loss]
    assert np.isfinite(loss[bad_gradient - 1])  # the loss is reported as it was, whatever its gradient
    assert [line["skipped"] for line in measured(made(name), "train")][:6] == [0, 0, 1, 2, 2, 2]
    # until the first bad step the run is an ordinary one
    np.testing.assert_allclose(loss[:2], curve(made("zero1"), "loss")[:2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", tiered(*(f"{zero}-poisoned" for zero in ZERO), slow=("zero0", "zero2")))
def test_training_recovers_from_skipped_steps(name, made):
    loss = curve(made(name), "loss")
    assert loss[-1] < loss[0] - 0.5
    assert checkpoint_at(made(name), STEPS).record["progress"]["updates"] == STEPS - len(SKIPPED)


def test_ten_bad_steps_in_a_row_end_the_run_and_say_which_samples(made):
    """Steps 4 to 13 are bad; of step 13's samples 96 … 103 those from rank 1's second micro-batch on are named."""
    run = made("all-bad")
    assert "[102, 103]" in made.outcomes["all-bad"]
    summary = json.loads((run / "summary.json").read_text())  # by which a sweep knows that there is no more to come
    assert (summary["step"], summary["validation_loss"]) == (13, None)


def test_a_run_without_one_good_step_is_no_success(made):
    run = made("nothing-learnt")
    assert f"none of the {FEW_STEPS} steps had a finite loss and gradient" in made.outcomes["nothing-learnt"]
    assert json.loads((run / "summary.json").read_text())["validation_loss"] is None


def test_weights_that_give_no_number_are_told_before_the_first_step(made):
    run = made("broken-start")
    assert "hold NaN or infinity" in made.outcomes["broken-start"]
    assert measured(run, "train") == [] and not (run / "summary.json").exists()


@pytest.mark.parametrize("name", ["zero1-unused", "zero3-unused"])
def test_a_parameter_that_the_loss_does_not_see_ends_the_run_at_its_first_step(name, made):
    run = made(name)
    assert "1 trainable parameters got no gradient in the first step: forgotten" in made.outcomes[name]
    assert measured(run, "train") == []


def test_a_full_disk_costs_one_checkpoint_and_not_the_run(made):
    """The disk is full in the middle of the save at step 4, on the one rank that writes."""
    run = made("disk-full")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-00000002", "step-00000006"]
    for step in (2, 6):
        checkpoint_at(run, step).verify()
    assert len(measured(run, "train")) == 6


def test_a_save_without_room_costs_one_checkpoint_and_writes_nothing(made):
    """There is room only from the third save on, at step 6."""
    run = made("no-room")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-00000006"]
    checkpoint_at(run, 6).verify()
    assert len(measured(run, "train")) == 6


def test_a_run_that_has_diverged_is_no_success_and_exports_nothing(made):
    run = made("diverged")
    assert "validation loss of nan" in made.outcomes["diverged"]
    assert json.loads((run / "summary.json").read_text())["validation_loss"] is None
    assert not (run / "hf").exists()
