"""The Slurm files, run by bash on stand-ins for srun and scontrol: one task per rank, the stop signal, the way back into the queue."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FILES = Path(__file__).parents[1] / "scripts" / "slurm"
JOB = 12345
# Two tasks on one node, which get the signal that srun gets.
SRUN = """#!/usr/bin/env bash
while [ "$1" != bash ]; do shift; done
trap 'kill -USR1 $tasks' USR1
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 "$@" &
    tasks+=" $!"
done
for task in $tasks; do
    while kill -0 $task 2>/dev/null; do wait $task; done
    wait $task || status=$?
done
exit ${status:-0}
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") printf 'node7\\nnode8\\n' ;;
    "show job") echo "JobId=$4 PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=${PREEMPT_TIME:-None} SuspendTime=None" ;;
    requeue*) echo "$2" >>requeued ;;
esac
"""
# What a rank does: start for a while, then train until it is asked to stop.
RANK = """
import json, os, pathlib, signal, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
record = {"arguments": sys.argv[1:]} | {name: os.environ[name] for name in names}
pathlib.Path(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(record))
if "--until_asked" in sys.argv:
    time.sleep(1)
    asked = []
    signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
    while not asked:
        time.sleep(0.05)
sys.exit(3 if "--fail" in sys.argv else 0)
"""


@pytest.fixture
def repository(tmp_path) -> Path:
    """A folder with the Slurm files, stages that only record how they were started, and `bin` with the stand-ins."""
    shutil.copytree(FILES, tmp_path / "scripts" / "slurm")
    for stage in ("stage1", "stage2"):
        (tmp_path / "scripts" / f"{stage}.py").write_text(RANK)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (commands / "python").symlink_to(sys.executable)
    return tmp_path


def _start(repository: Path, *options: str, stage: str = "stage1", **environment: str) -> subprocess.Popen:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
    job = {"SLURM_JOB_ID": str(JOB), "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_CPUS_PER_TASK": "1"}
    path = {"PATH": f"{repository / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", f"scripts/slurm/{stage}.sbatch", *options]
    return subprocess.Popen(command, cwd=repository, env=given | job | path | environment)


def _requeued(repository: Path) -> list[str]:
    file = repository / "requeued"
    return file.read_text().split() if file.is_file() else []


def _wait_for_ranks(repository: Path) -> None:
    deadline = time.monotonic() + 30
    while len(list(repository.glob("rank-*.json"))) < 2:
        assert time.monotonic() < deadline, "the ranks have not started"
        time.sleep(0.05)


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_each_task_is_a_rank_that_resumes_and_gets_the_users_options_last(repository, stage):
    assert _start(repository, "--output_dir", "runs/my own", stage=stage).wait(30) == 0
    for rank in range(2):
        record = json.loads((repository / f"rank-{rank}.json").read_text())
        assert record["arguments"][0] == "--resume"
        assert record["arguments"][-2:] == ["--output_dir", "runs/my own"]
        assert (record["RANK"], record["LOCAL_RANK"], record["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert (record["MASTER_ADDR"], int(record["MASTER_PORT"]) in range(20000, 32000)) == ("node7", True)
    assert _requeued(repository) == []


def test_a_signal_while_the_ranks_start_still_ends_in_a_save_and_the_queue(repository):
    job = _start(repository, "--until_asked")
    _wait_for_ranks(repository)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 0
    assert _requeued(repository) == [str(JOB)]


def test_a_preempted_job_that_has_saved_goes_back_into_the_queue(repository):
    assert _start(repository, PREEMPT_TIME="2026-01-01T00:00:01").wait(30) == 0
    assert _requeued(repository) == [str(JOB)]


def test_a_failed_job_keeps_its_status_and_stays_out_of_the_queue(repository):
    job = _start(repository, "--until_asked", "--fail", PREEMPT_TIME="2026-01-01T00:00:01")
    _wait_for_ranks(repository)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 3
    assert _requeued(repository) == []


def _start_array(repository: Path, number: int, **environment: str) -> subprocess.Popen:
    """Task `number` of the array 77 over a file of two commands."""
    words = ["deepspeed", str(repository / "scripts" / "stage2.py"), "--output_dir", "runs/it's one"]
    (repository / "commands.txt").write_text(f"deepspeed scripts/stage1.py --seed 1\n{shlex.join(words)} --until_asked\n")
    place = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": str(number)}
    return _start(repository, "commands.txt", stage="array", **place | environment)


def test_a_task_of_an_array_runs_its_line_and_goes_back_alone(repository):
    """The number of one task of an array is the array's own: to requeue that would start all of it again."""
    job = _start_array(repository, 2, SLURM_JOB_ID="77")
    _wait_for_ranks(repository)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 0
    record = json.loads((repository / "rank-1.json").read_text())
    assert record["arguments"] == ["--resume", "--output_dir", "runs/it's one", "--until_asked"]
    assert _requeued(repository) == ["77_2"]


def test_a_task_without_a_line_fails(repository):
    assert _start_array(repository, 3).wait(30) == 2
    assert not list(repository.glob("rank-*.json"))
