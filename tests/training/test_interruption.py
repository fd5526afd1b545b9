"""Kills and signals, sent to real processes: whatever the moment, --resume ends as if nothing had happened."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megahedge.checkpoint.store import complete_checkpoints
from megahedge.training.metrics import read_metrics
from tests.training.conftest import LONG_STEPS
from tests.training.processes import SCRIPT, Command, start
from tests.training.runs import (
    GLOBAL_BATCH_SIZE,
    REPOSITORY,
    SEQ_LEN,
    STEPS,
    assert_same_end,
    checkpoint_at,
    command_line,
    differing,
    measured,
)


def _finish(options, folder):
    status, stderr = start(options | {"resume": True}, folder).finish()
    assert status == 0, stderr


def _assert_same_export(run, unbroken):
    for path in (unbroken / "hf").iterdir():
        assert (run / "hf" / path.name).read_bytes() == path.read_bytes(), path.name


# removals and the later writes of metrics come after the first checkpoints; the others are met the first time and again
_MOMENTS = [
    ("record", 1), ("metrics", 1), ("metrics", 2), ("metrics", 9), ("tensors", 1), ("tensors", 4), ("manifest", 1), ("manifest", 3),
    ("rename", 1), ("rename", 2), ("latest", 1), ("latest", 2), ("removal", 1), ("removal", 2), ("removal", 4),
    ("summary", 1), ("export", 1),
]  # fmt: skip
_FAST = [("tensors", 4), ("rename", 2)]


@pytest.mark.parametrize(("point", "passing"), [pytest.param(*m, marks=() if m in _FAST else pytest.mark.slow) for m in _MOMENTS])
def test_a_kill_at_the_worst_moment_costs_no_checkpoint(point, passing, options, tmp_path, made):
    killed = start(options(save_interval=4, keep_last=2, resume=True), tmp_path, hold=(point, passing))
    killed.wait_until_held()
    complete = len(complete_checkpoints(tmp_path / "run" / "checkpoints"))
    killed.signal(signal.SIGKILL)
    assert killed.finish()[0] == -signal.SIGKILL
    if (point, passing) in _FAST:
        assert complete == 1  # the second save was under way
    _finish(options(save_interval=4, keep_last=2), tmp_path)
    assert_same_end(tmp_path / "run", made("zero1"))
    _assert_same_export(tmp_path / "run", made("zero1"))
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"latest", "step-00000016", "step-00000020"}
    assert [path.name for path in (tmp_path / "run").rglob(".*")] == [".lock"]


KILLS, KILLS_INSIDE_A_SAVE = 30, 10


@pytest.mark.slow
def test_thirty_kills_at_random_moments_end_as_the_unbroken_run(options, tmp_path, made):
    """Of two processes one or both are killed; the other ends by itself, and the next start goes on.  Saves take their time."""
    generator = random.Random(3)
    run = tmp_path / "run"
    changes = {"train_tokens": LONG_STEPS * SEQ_LEN * GLOBAL_BATCH_SIZE, "save_interval": 1, "keep_last": 2, "resume": True}
    for kill in range(KILLS):
        ranks = _start_two(options(**changes), tmp_path, slow_saves=0.3 if kill < KILLS_INSIDE_A_SAVE else 0.05)
        known = len(read_metrics(run / "metrics.jsonl"))
        ranks[0].wait_until(lambda known=known: len(read_metrics(run / "metrics.jsonl")) != known)
        if kill < KILLS_INSIDE_A_SAVE:
            ranks[0].wait_until(lambda: any((run / "checkpoints").glob(".unfinished-step-*")))
        time.sleep(generator.uniform(0.0, 0.2))
        assert ranks[0].running, "the run ended before all kills; make it slower"
        for rank in generator.choice([[0], [1], [0, 1]]):
            ranks[rank].signal(signal.SIGKILL)
        assert all(rank.finish()[0] in (1, -signal.SIGKILL) for rank in ranks)
    for rank in _start_two(options(**changes), tmp_path):
        status, stderr = rank.finish()
        assert status == 0, stderr
    assert_same_end(run, made("long-dp2"), LONG_STEPS)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _start_two(options: dict, folder: Path, **changes) -> list[Command]:
    """Both ranks of a job of two processes."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    places = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return [start(options, folder / f"rank{rank}", environment=place, **changes) for rank, place in enumerate(places)]


def test_a_signal_before_the_first_step_ends_the_run_well(options, tmp_path, made):
    """While it writes its record, when most of the start is over."""
    command = start(options(), tmp_path, hold=("record", 1))
    command.wait_until_held()
    command.signal(signal.SIGUSR1)
    command.release()
    status, stderr = command.finish()
    assert status == 0, stderr
    assert "asked to stop by a signal before the first step" in stderr
    _finish(options(), tmp_path)
    assert_same_end(tmp_path / "run", made("zero1"))


def test_a_storm_of_signals_ends_well(options, tmp_path):
    """As of a scheduler that repeats itself until the job is gone: after the save, too."""
    command = start(options(), tmp_path, hold=("evaluation", 1))
    command.wait_until_held()
    command.release()
    while command.running:
        command.signal(signal.SIGTERM)
        time.sleep(0.01)
    status, stderr = command.finish()
    assert status == 0, stderr


def test_a_folder_that_is_removed_during_the_run_is_made_again(options, tmp_path, made):
    command = start(options(), tmp_path, hold=("evaluation", 2))
    command.wait_until_held()
    shutil.rmtree(tmp_path / "run")
    command.release()
    status, stderr = command.finish()
    assert status == 0, stderr
    assert "was removed while the run writes there: it is written again" in stderr
    _finish(options(), tmp_path)  # understands what it finds, and has nothing left to do
    assert differing(checkpoint_at(tmp_path / "run", STEPS), checkpoint_at(made("zero1"), STEPS)) == []
    assert measured(tmp_path / "run") == measured(made("zero1"))[-len(measured(tmp_path / "run")) :]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_makes_the_run_save_and_end_well(number, options, tmp_path, made):
    """It comes during the evaluation after step 10; no checkpoint is due before the end, so what there is was saved because of it."""
    command = start(options(save_interval=1000), tmp_path, hold=("evaluation", 2))
    run = tmp_path / "run"
    command.wait_until_held()
    command.signal(number)
    command.release()
    status, stderr = command.finish()
    assert status == 0, stderr
    assert [path.name for path in complete_checkpoints(run / "checkpoints")] == ["step-00000011"]
    assert "saved at step 11" in stderr
    assert not (run / "summary.json").exists()
    _finish(options(save_interval=1000), tmp_path)
    assert_same_end(run, made("zero1"))


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_who_name_it(options, tmp_path):
    """Under the deepspeed launcher, whose own last line names another one; two minutes are what a job may go on costing."""
    words = command_line(options(save_interval=1000, train_tokens=100_000 * SEQ_LEN * GLOBAL_BATCH_SIZE))
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", _free_port()]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen([*launcher, str(SCRIPT), *words], env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 240
            while len(read_metrics(tmp_path / "run" / "metrics.jsonl")) < 5:
                assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
                time.sleep(0.2)
            (process,) = _ranks_of(job.pid, "--local_rank=1")
            process.kill()
            assert job.wait(120) != 0
        finally:
            for left in _ranks_of(job.pid, "--local_rank="):
                left.kill()
            job.kill()
    told = (tmp_path / "output").read_text()
    assert "[rank 0] error: rank 1 of the job has gone" in told, told


def _ranks_of(launcher: int, word: str) -> list[psutil.Process]:
    """Processes that a launcher has started, with a word of their command line that begins like that."""
    try:
        children = psutil.Process(launcher).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    ranks = [child for child in children if any(each.endswith("pretrain_teacher.py") for each in child.cmdline())]
    return [rank for rank in ranks if any(each.startswith(word) for each in rank.cmdline())]
