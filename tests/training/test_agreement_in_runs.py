"""What all ranks must do together when something happens to one: stop, go on without a file, or end with one message."""

import json
import shutil
import signal

import numpy as np
import pytest

from megahedge.checkpoint.store import complete_checkpoints
from tests.training.conftest import RELEASED, RELEASED_FAST
from tests.training.processes import start
from tests.training.runs import STEPS, assert_same_end, checkpoint_at, copy_crashed, curve, differing, measured


def contents(folder) -> dict[str, bytes]:
    """Every file of a folder of files."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- a stop that is asked of one rank -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "step", "evaluated"), [("stopped-at-10", 10, [0]), ("stopped-at-end", STEPS, [0, 10])])
def test_a_stop_saves_before_the_evaluation_that_is_due(name, step, evaluated, made):
    """Rank 1 of two was told in a step after which an evaluation, and at the end the summary, would follow."""
    run = made(name)
    assert [path.name for path in complete_checkpoints(run / "checkpoints")] == [f"step-{step:08d}"]
    assert checkpoint_at(run, step).record["progress"]["evaluation_due"] is True
    assert [line["step"] for line in measured(run, "train")] == list(range(1, step + 1))
    assert [line["step"] for line in measured(run, "eval")] == evaluated
    assert not (run / "summary.json").exists() and not (run / "hf").exists()


@pytest.mark.parametrize("name", ["stopped-at-10", "stopped-at-end"])
def test_the_resumed_run_makes_that_evaluation_once(name, made):
    run, unbroken = made(f"{name}-resumed"), made("zero1-dp2")
    assert measured(run) == measured(unbroken)
    assert differing(checkpoint_at(run, STEPS), checkpoint_at(unbroken, STEPS)) == []
    assert contents(run / "hf") == contents(unbroken / "hf")
    assert json.loads((run / "summary.json").read_text()) == json.loads((unbroken / "summary.json").read_text())


# ---- files that cannot be written ---------------------------------------------------------------------------------------------


def test_all_ranks_end_where_the_last_checkpoint_is_lost(made):
    """The save at step 3 is sound; that of step 6, on which the run was to end, is not.  (Both ranks raised: see `Worlds`.)"""
    run = made("last-save-lost")
    assert made.outcomes["last-save-lost"].startswith("the run ends at step 6 and its checkpoint could not be written")
    assert [path.name for path in complete_checkpoints(run / "checkpoints")] == ["step-00000003"]
    checkpoint_at(run, 3).verify()


def test_a_run_whose_checkpoints_cannot_be_written_trains_to_its_end_and_fails_there(options, tmp_path):
    """A file stands where the folder of checkpoints would be: the save at step 10 costs a message, the last one the exit status."""
    command = start(options(), tmp_path, hold=("evaluation", 1))
    command.wait_until_held()
    run = tmp_path / "run"
    (run / "checkpoints").write_text("in the way")
    command.release()
    status, stderr = command.finish()
    assert status == 1, stderr
    assert "checkpoint at step 10 was NOT written" in stderr and "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith(f"error: the run ends at step {STEPS} and its checkpoint could not be written")
    assert [line["step"] for line in measured(run, "train")] == list(range(1, STEPS + 1))
    assert not (run / "summary.json").exists() and not (run / "hf").exists()


def test_a_value_that_is_no_number_is_null_and_its_step_counts(made):
    """Rank 1's metric is NaN, its loss and gradients are not."""
    lines = measured(made("odd-metrics"), "train")
    assert [line["broken"] for line in lines] == [None, None, None]
    assert [line["rank"] for line in lines] == [0.5, 0.5, 0.5]  # the mean over the ranks
    assert all(np.isfinite(line["loss"]) and line["skipped"] == 0 for line in lines)


def test_a_run_outlives_its_metrics_file(made):
    """The disk refuses the line of step 4."""
    run = made("odd-metrics")
    assert [line["step"] for line in measured(run, "train")] == [1, 2, 3]
    checkpoint = checkpoint_at(run, 6)
    checkpoint.verify()
    assert checkpoint.record["progress"]["updates"] == 6


def test_an_export_that_fails_is_one_message_on_all_ranks_and_leaves_the_old_model(made):
    run, before = made("export-lost"), made("zero1-dp2")
    assert made.outcomes["export-lost"].startswith(f"the model could not be written to {run / 'hf'}: ")
    assert contents(run / "hf") == contents(before / "hf")
    assert {path.name for path in run.iterdir()} == {path.name for path in before.iterdir()}  # no half of the new one either


# ---- parameters that no rank holds whole --------------------------------------------------------------------------------------

released = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in RELEASED_FAST else pytest.mark.slow) for name in RELEASED]
)


@released
def test_released_parameters_follow_the_curve_of_one_process(name, made):
    reference = made("tied" if "-tied-" in name else "zero1")
    for key in ("loss", "grad_norm"):
        mine, theirs = (curve(run, key)[:10] for run in (made(name), reference))
        assert len(mine) == len(theirs) == 10
        # sums are taken in another order, and AdamW enlarges what that changes: 1e-6 after ten steps where nothing is wrong
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4, err_msg=key)


@released
def test_runs_with_released_parameters_resume_exactly(name, made):
    assert checkpoint_at(made(f"{name}-resumed"), 5).record["progress"]["updates"] == 5
    assert_same_end(made(f"{name}-resumed"), made(name), step=10)


# ---- two jobs, and data that has moved ----------------------------------------------------------------------------------------


def test_two_jobs_do_not_share_a_folder_and_one_that_resumes_waits_for_a_killed_one(options, tmp_path):
    """As when a requeued job starts before its predecessor has gone."""
    first = start(options(resume=True, stop_after=1), tmp_path / "first", hold=("evaluation", 1))
    first.wait_until_held()
    status, stderr = start(options(stop_after=1), tmp_path / "second").finish()
    assert status == 2 and "Traceback" not in stderr
    assert "holds a run without a checkpoint; go on with it by --resume" in stderr
    third = start(options(resume=True, stop_after=1), tmp_path / "third")
    third.wait_for_output(f"--output_dir={tmp_path / 'run'} is in use by another job; waiting 150 seconds at most for it to end")
    assert first.running and third.running
    first.signal(signal.SIGKILL)
    first.finish()
    status, stderr = third.finish()
    assert status == 0, stderr
    assert [path.name for path in complete_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000001"]


@pytest.fixture
def moved(options, inputs, made, tmp_path):
    """Options that resume the run `zero1` at step 10, with all inputs in a folder of another name."""
    folder = tmp_path / "moved"
    shutil.copytree(inputs, folder, ignore=lambda _, names: [name for name in names if not name.startswith(("data", "model", "tok"))])
    copy_crashed(made("zero1"), tmp_path / "run", step=10)
    places = {"data_path": (str(folder / "data"),), "model_config": str(folder / "model.json"), "tokenizer": str(folder / "tokenizer")}
    return options(resume=True, **places)


def test_a_run_resumes_exactly_when_its_inputs_have_moved(moved, made, tmp_path):
    status, stderr = start(moved, tmp_path).finish()
    assert status == 0, stderr
    assert_same_end(tmp_path / "run", made("zero1"))


def test_other_tokens_in_documents_of_the_same_lengths_are_refused(moved, tmp_path):
    path = tmp_path / "moved" / "data_train.bin"
    tokens = np.fromfile(path, np.uint16)
    middle = len(tokens) // 2
    tokens[middle] = 1 + tokens[middle] % 90
    tokens.tofile(path)
    status, stderr = start(moved, tmp_path).finish()
    assert status == 2, stderr
    assert "data.train.0.bin_blocks_sha256 was" in stderr.splitlines()[-1]
    assert len(complete_checkpoints(tmp_path / "run" / "checkpoints")) == 1
