"""Runs of other commands, several at a time, that a second start does not repeat."""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megahedge.utils.errors import InputError, RunError
from megahedge.utils.files import check_output_folder, read_json_object, write_json
from megahedge.utils.logging import get_logger

logger = get_logger(__name__)

_PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # of Linux alone
_LOOK_SECONDS = 0.2
"""Between two looks at whether to stop."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A training command and the run folder that it fills."""

    script: Path
    options: dict
    """By name, output_dir not among them; None leaves an option out."""
    folder: Path
    start: "Job | None" = None
    """The job whose run it starts from; where that has diverged there is nothing to start from, and it counts as diverged as well."""

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
        """Figures of the run where it has ended, by its budget or by divergence; None where it has not."""
        before = self.start and self.start.summary()
        if before and before["validation_loss"] is None:
            return {"validation_loss": None, "tokens": 0}
        path = self.folder / "summary.json"
        return read_json_object(path) if path.is_file() else None

    def seconds(self) -> float:
        """Wall time of all starts of it so far that have not been killed from outside."""
        path = self.beside(".seconds.json")
        return read_json_object(path)["seconds"] if path.is_file() else 0.0

    def beside(self, suffix: str) -> Path:
        """A file that belongs to the run folder and lies next to it."""
        return self.folder.with_name(self.folder.name + suffix)

    def claim(self) -> None:
        """Note the options with which the folder is made; those of a run that was never started are replaced.

        Raises InputError where it was made with others.
        """
        record, now = self.beside(".options.json"), json.loads(json.dumps({"script": self.script.name} | self.options))
        # a log is there before the run's own record: another process may have just started it
        begun = any(path.is_file() for path in (self.folder / "run.json", self.folder / "summary.json", self.beside(".log")))
        if not record.is_file() or not begun:
            if begun:
                raise InputError(
                    f"{self.folder} holds a run with options that are not known, as {record.name} is missing; remove the folder"
                )
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            write_json(record, now)
            return
        before = read_json_object(record)
        changed = [name for name in before | now if before.get(name) != now.get(name)]
        if changed:
            pairs = ", ".join(f"{name} {before.get(name)} (now {now.get(name)})" for name in changed)
            raise InputError(f"{self.folder} was made with {pairs}; use these again, or another --output_dir")


def check_jobs(output_dir: str, parallel: int, **values: Sequence) -> None:
    """Check the options of a command that runs jobs: where, how many at a time, and lists, none of which may be empty or repeat itself.

    Raises InputError.
    """
    check_output_folder("output_dir", output_dir)
    if parallel < 1:
        raise InputError(f"--parallel={parallel} must be at least 1")
    for name, given in values.items():
        if not given:
            raise InputError(f"--{name} needs at least one value")
        if len(set(given)) < len(given):
            raise InputError(f"--{name}={' '.join(map(str, given))} names a value twice; the runs would be the same")


def run_jobs(jobs: Sequence[Job], parallel: int = 1) -> list[dict]:
    """Run what is not finished, `parallel` at a time, output to `<folder>.log`; returns the summaries in the order of the jobs.

    SIGTERM and Ctrl-C are passed on to the runs, which save and end.
    Raises InputError, before anything runs, where a folder was made with other options, and RunError at the first run that fails, with
    the last line that it printed, once those that run beside it have ended; no other one is started then.
    """
    for job in jobs:
        job.claim()
    runner = _Runner()
    with _told_to(runner.stop), concurrent.futures.ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(runner.run, job) for job in jobs]
        try:
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        finally:
            pool.shutdown(cancel_futures=True)
        failed = [future for future in futures if not future.cancelled() and future.exception()]
        return [future.result() for future in failed or futures]


@contextlib.contextmanager
def _told_to(stop: Callable[[], None]) -> Iterator[None]:
    """Within it SIGTERM and Ctrl-C call `stop` and raise RunError."""

    def handle(number, frame):
        stop()
        raise RunError(f"stopped by {signal.Signals(number).name}; what is unfinished goes on at the next start")

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Runner:
    """Runs jobs, each in the thread that asks for it, until one has failed or it is told to stop."""

    def __init__(self):
        self._closed, self._stopping = threading.Event(), threading.Event()

    def stop(self) -> None:
        """Start no other job, and let those that run save and end."""
        self._closed.set()
        self._stopping.set()

    def run(self, job: Job) -> dict:
        """The summary of a job, which is run unless it has one.  Raises RunError where it ends without."""
        if job.summary() is None:
            log = job.beside(".log")
            start = time.monotonic()
            status = self._status(job, log)
            write_json(job.beside(".seconds.json"), {"seconds": job.seconds() + time.monotonic() - start})
            if job.summary() is None:  # one that has diverged has figures, and a status of 1
                self._closed.set()
                lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["(no output)"]
                raise RunError(f"{job.folder} ended with status {status}: {lines[-1].strip()} (all of it in {log})")
        return job.summary()

    def _status(self, job: Job, log: Path) -> int:
        """Start it and wait for its end."""
        if self._closed.is_set():
            raise RunError(f"{job.folder} was not started")
        logger.info("running %s (output in %s)", job.folder, log)
        prepare = functools.partial(_tie_to_parent, os.getpid())
        with log.open("a", encoding="utf-8") as handle:
            # in a session of its own: a Ctrl-C reaches it once, through us
            process = subprocess.Popen(job.command(), stdout=handle, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=prepare)
            while not self._stopping.is_set():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(_LOOK_SECONDS)
            process.terminate()
            return process.wait()


def _tie_to_parent(parent: int) -> None:
    """Let the kernel tell this process to save and end where its parent is killed; it would else keep its folder from the next start.

    Between fork and exec.  The parent's handler would swallow a signal that comes now.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
