"""Runs of other commands, several at a time, that a second start does not repeat."""

import concurrent.futures
import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megahedge.utils.errors import RunError
from megahedge.utils.files import read_json_object
from megahedge.utils.logging import get_logger

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Job:
    """A training command and the run folder that it fills."""

    script: Path
    options: dict
    """By name, output_dir not among them; None leaves an option out."""
    folder: Path

    def command(self) -> list[str]:
        """Words to start it, or to go on with what an earlier start has left."""
        words = [sys.executable, str(self.script), "--output_dir", str(self.folder)]
        for name, value in self.options.items():
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no_{name}")
            elif isinstance(value, (tuple, list)):
                words += [f"--{name}", *map(str, value)]
            elif value is not None:
                words += [f"--{name}", str(value)]
        return [*words, "--resume"] if (self.folder / "run.json").is_file() else words

    def summary(self) -> dict | None:
        """Figures of the finished run; None where it is not finished."""
        path = self.folder / "summary.json"
        return read_json_object(path) if path.is_file() else None


def run_jobs(jobs: Sequence[Job], parallel: int = 1) -> list[dict]:
    """Run what is not finished, `parallel` at a time, output to `<folder>.log`; returns the summaries in the order of the jobs.

    Raises RunError at the first that fails, with the last line that it printed, once those that run beside it have ended.
    """
    with concurrent.futures.ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(_run, job) for job in jobs]
        try:
            return [future.result() for future in futures]
        except RunError:
            pool.shutdown(cancel_futures=True)
            raise


def _run(job: Job) -> dict:
    if job.summary() is None:
        log = job.folder.with_name(f"{job.folder.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        logger.info("running %s (output in %s)", job.folder, log)
        with log.open("a", encoding="utf-8") as handle:
            status = subprocess.run(job.command(), stdout=handle, stderr=subprocess.STDOUT).returncode
        if job.summary() is None:  # one that has diverged has figures, and a status of 1
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["(no output)"]
            raise RunError(f"{job.folder} ended with status {status}: {lines[-1].strip()} (all of it in {log})")
    return job.summary()
