"""Both stages through two_stage.sbatch on a real Slurm of two virtual nodes: whatever interrupts the job, it comes back by itself."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megahedge.training.metrics import read_metrics
from tests.distributed import run_distributed
from tests.slurm.cluster import Cluster, free_ports, wait_until, why_not
from tests.stages.runs import StageRun, make_stage_inputs, make_stage_runs
from tests.training.runs import GLOBAL_BATCH_SIZE, REPOSITORY, SEQ_LEN, checkpoint_at, differing, measured

reason = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(reason is not None, reason=str(reason))]

STEPS = 80
PROCESSES = 4
_START_SECONDS = 240  # four processes that import torch and DeepSpeed on two cores, beside other tests
# what the file asks for is a node of eight GPUs
_SIZE = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--gres=none", "--mem=0", "--time=60")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """A running Slurm."""
    slurm = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Folder with data, and with a teacher in `pretrained/hf`."""
    folder = tmp_path_factory.mktemp("inputs")
    make_stage_inputs(folder)
    run_distributed(make_stage_runs, 1, folder, [StageRun("pretrained", 0, None, {"model_config": "teacher.json"})])
    return folder


def _options(inputs: Path) -> list[str]:
    sizes = {
        "dtype": "fp32",
        "seq_len": SEQ_LEN,
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "train_tokens": STEPS * SEQ_LEN * GLOBAL_BATCH_SIZE,
        "eval_tokens": 500,
        "save_interval": 1000,
    }
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    return [*words, "--recipe", "tuned", "--data_path", str(inputs / "data"), "--teacher", str(inputs / "pretrained" / "hf")]


@pytest.fixture(scope="module")
def plain(inputs) -> Path:
    """Folder of the same two runs, never broken off, by the deepspeed launcher."""
    folder = inputs / "plain"
    for stage in ("stage1", "stage2"):
        words = ["--num_accelerators", str(PROCESSES), "--master_port", str(free_ports(1)[0]), f"scripts/{stage}.py"]
        options = ["--ds_config", "ds_configs/zero2.json", *_options(inputs), "--output_dir", str(folder / stage)]
        start = ["--init_from", str(folder / "stage1")] if stage == "stage2" else []
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]
        done = subprocess.run(
            [*launcher, *words, *options, *start], cwd=REPOSITORY, env=_environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def _submit(cluster: Cluster, folder: Path, file: str, *words: str, options: tuple[str, ...] = ()) -> str:
    """Number of the job.  Both nodes are this machine, whose name no other can resolve."""
    submit = ["sbatch", "--parsable", *_SIZE, *options, f"--output={folder}-%j.out", f"scripts/slurm/{file}.sbatch", *words]
    return cluster(*submit, cwd=REPOSITORY, **_environment() | {"MASTER_ADDR": "127.0.0.1"}).strip()


def _wait_for_step(run: Path, step: int) -> None:
    def reached() -> bool:
        return any(line["step"] >= step for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train")

    wait_until(reached, f"{run} has not reached step {step}", _START_SECONDS)


def _kill_a_rank(script: str, rank: int) -> None:
    """kill -9 the process that runs the script as this rank of a Slurm job."""
    found = subprocess.run(["pgrep", "-f", f"python scripts/{script} --resume"], capture_output=True, text=True, check=False)
    environments = {process: Path(f"/proc/{process}/environ").read_text().split("\0") for process in map(int, found.stdout.split())}
    (process,) = [process for process, environment in environments.items() if f"SLURM_PROCID={rank}" in environment]
    os.kill(process, signal.SIGKILL)


def test_a_job_comes_back_from_whatever_interrupts_it_and_ends_as_a_plain_run(cluster, inputs, plain):
    """kill -9 of a rank, Slurm's signal before the time limit, and a requeue by the administrator; nothing is started by hand."""
    folder = inputs / "interrupted"
    job = _submit(cluster, folder, "two_stage", str(folder), *_options(inputs), "--save_interval", "10")
    _wait_for_step(folder / "stage1", 15)
    _kill_a_rank("stage1.py", 2)
    cluster.start_now(job)
    _wait_for_step(folder / "stage1", 40)
    cluster("scancel", "--batch", "--signal=USR1", job)
    cluster.start_now(job)
    _wait_for_step(folder / "stage2", 30)
    cluster("scontrol", "requeue", job)
    cluster.start_now(job)
    state = cluster.wait_for_state(job, ("COMPLETED", "FAILED"), 2 * _START_SECONDS)
    output = Path(f"{folder}-{job}.out").read_text()
    assert state == "COMPLETED", output[-5000:]
    assert cluster.job(job)["Restarts"] == "3"
    assert re.search(r"failed with status 1(37|43); going back", output)  # srun's: that of the rank, or of those that it ended
    assert "task 2: Killed" in output and "error: rank 2 of the job has gone" in output
    assert "saved before the end of the run; going back" in output
    for stage in ("stage1", "stage2"):
        assert measured(folder / stage) == measured(plain / stage)
        assert differing(checkpoint_at(folder / stage, STEPS), checkpoint_at(plain / stage, STEPS)) == []
        assert len(json.loads((folder / stage / "run.json").read_text())["history"]) == {"stage1": 2, "stage2": 1}[stage]
