"""The folder of a run: what it was told, what it ran with, what it measured.

run.json         options, command, code version, packages, data, model: written at every start, older starts kept in `history`
metrics.jsonl    one line a logged step or evaluation
checkpoints/     see megahedge/checkpoint/store.py
summary.json     final figures, written when the run has used its budget or has diverged
"""

import contextlib
import dataclasses
import os
import platform
import sys
import time
from pathlib import Path

from megahedge.checkpoint.store import best_checkpoint, complete_checkpoints
from megahedge.config.options import TrainOptions
from megahedge.utils.errors import InputError, RunError
from megahedge.utils.files import NO_LOCKS, file_lock, is_temporary_file, read_json, remove_temporary_files, write_json
from megahedge.utils.logging import get_logger
from megahedge.utils.versions import code_version, package_versions

logger = get_logger(__name__)

SECONDS_FOR_PREDECESSOR = 150.0
"""What a job that resumes gives the last one to end: Slurm kills 30 seconds after it has asked, NFS frees a dead node's lock after 90."""

# What another topology, machine or watcher may change on resume: nothing of it enters the mathematics of a step.
# Where data, tokenizer, model config, teacher and first weights lie may change too: what they are is compared by content.
MAY_CHANGE = {
    "output_dir", "ds_config", "micro_batch_size", "tp_size", "activation_checkpointing", "log_interval", "eval_interval", "save_interval",
    "keep_last", "resume", "dry_run", "print_trainable", "stop_after", "wandb_project", "run_name", "peak_tflops", "keep_best", "mmap",
    "index_cache_dir", "eval_tokens", "export_dtype", "data_path", "val_data_path", "tokenizer", "model_config", "init_from", "teacher",
    "teacher_revision",
}  # fmt: skip


class RunFolder:
    """Paths of one run, and the checks before anything is written there."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.record_file = self.path / "run.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.summary_file = self.path / "summary.json"
        self._lock_file = self.path / ".lock"
        self._record = None

    def check(self, options: TrainOptions) -> None:
        """Refuse to write over another run, or to resume one under options that would make it another.

        Raises InputError.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--output_dir={self.path} is a file; name a folder")
        parent = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            reason = "may not be written" if parent.is_dir() else "is a file"
            raise InputError(f"--output_dir={self.path} cannot be made: {parent} {reason}; name a folder elsewhere")
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise InputError(f"{self.checkpoints} is no folder; remove it, or name another --output_dir")
        if not self.record_file.is_file():
            if self.path.is_dir() and not all(path == self._lock_file or is_temporary_file(path) for path in self.path.iterdir()):
                raise InputError(f"--output_dir={self.path} is not empty and holds no run; name another folder")
            return
        if not options.resume:
            found = complete_checkpoints(self.checkpoints)
            state = f"a run with checkpoint {found[0].name}" if found else "a run without a checkpoint"
            raise InputError(f"--output_dir={self.path} holds {state}; go on with it by --resume, or name another folder")
        before = self.read_record().get("options")
        if not isinstance(before, dict):
            raise InputError(f"{self.record_file} holds no options of a run; put it right, or name another --output_dir")
        now = _plain(dataclasses.asdict(options))
        changed = [name for name in now if name in before and name not in MAY_CHANGE and before[name] != now[name]]
        if options.keep_best and best_checkpoint(self.checkpoints) and before.get("eval_tokens") != now["eval_tokens"]:
            changed.append("eval_tokens")  # the best checkpoint's loss would be compared with those of other tokens
        if changed:
            pairs = ", ".join(f"--{name} {before[name]} (now {now[name]})" for name in changed)
            why = "; the learning rate's schedule and the order of samples are made for these" if "train_tokens" in changed else ""
            raise InputError(f"--resume of {self.path}: the run was started with {pairs}{why}; use these again, or a new --output_dir")

    @contextlib.contextmanager
    def locked(self, wait_seconds: float = 0):
        """Hold the folder against other jobs; rank 0 does.  The system frees it when the process ends, however it ends.

        Waits for another job that holds it, as a requeued job may start before the last process of its predecessor has gone.
        Raises InputError where that job goes on, RunError where it was waited for.
        """
        with contextlib.ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"--output_dir={self.path} cannot be made: {error.strerror}; name a folder elsewhere") from None
            held.enter_context(self._lock(wait_seconds))
            yield

    @contextlib.contextmanager
    def _lock(self, wait_seconds: float):
        deadline, told = time.monotonic() + wait_seconds, False
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(file_lock(self._lock_file, blocking=False))
                    break
                except BlockingIOError:
                    problem = f"--output_dir={self.path} is in use by another job"
                except OSError as error:
                    if error.errno not in NO_LOCKS:
                        raise
                    logger.warning("%s", without_locks(self.path, os.strerror(error.errno)))
                    break
                if time.monotonic() >= deadline:
                    kind = RunError if wait_seconds else InputError
                    raise kind(f"{problem}; wait for it to end, or name another folder")
                if not told:
                    logger.info("%s; waiting %g seconds at most for it to end", problem, wait_seconds)
                    told = True
                time.sleep(min(1.0, wait_seconds))
            yield

    def read_record(self) -> dict:
        """Contents of run.json.  Raises InputError if it cannot be read."""
        try:
            record = read_json(self.record_file)
        except (OSError, ValueError) as error:
            raise InputError(f"{self.record_file} cannot be read: {error}; name a run folder") from None
        if not isinstance(record, dict):
            raise InputError(f"{self.record_file} is no record of a run; name a run folder")
        return record

    def write_record(self, command: str, options: TrainOptions, facts: dict) -> None:
        """Write run.json; the record of earlier starts moves into its history."""
        start = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command_line": sys.argv,
            "code": code_version(),
            "packages": package_versions(),
            "python": platform.python_version(),
        }
        record = {"command": command, "options": dataclasses.asdict(options), **start, **facts, "history": []}
        if self.record_file.is_file():
            before = self.read_record()
            history = before.pop("history", [])
            record["history"] = [*(history if isinstance(history, list) else []), before]
        remove_temporary_files(self.path)
        write_json(self.record_file, record)
        self._record = record

    def restore_record(self) -> bool:
        """Write run.json again where somebody has removed it, or the whole folder, while the run is at it; whether that was so."""
        if self._record is None or self.record_file.exists():
            return False
        write_json(self.record_file, self._record)
        return True


def without_locks(path: Path, reason: str) -> str:
    """What to tell of a run folder in which file locks do not work."""
    return (
        f"file locks do not work in {path} ({reason}): nothing keeps a second job from writing to the same run; start one at a time, or "
        "put --output_dir on a file system that has locks (Lustre: mounted with `flock`)"
    )


def _plain(value):
    """As JSON gives it back."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
