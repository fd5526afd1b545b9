"""The folder of a run: what it was told, what it ran with, what it measured.

run.json         options, command, code version, packages, data, model: written at every start, older starts kept in `history`
metrics.jsonl    one line a logged step or evaluation
checkpoints/     see megahedge/checkpoint/store.py
summary.json     final figures, written when the run has used its budget
"""

import dataclasses
import importlib.metadata
import platform
import subprocess
import sys
import time
from pathlib import Path

from megahedge.checkpoint.store import complete_checkpoints
from megahedge.config.options import TrainOptions
from megahedge.utils.errors import InputError
from megahedge.utils.files import is_temporary_file, read_json, remove_temporary_files, write_json

# What another topology, machine or watcher may change on resume: nothing of it enters the mathematics of a step.
MAY_CHANGE = {
    "output_dir", "ds_config", "micro_batch_size", "tp_size", "activation_checkpointing", "log_interval", "eval_interval", "save_interval",
    "keep_last", "resume", "dry_run", "print_trainable", "stop_after", "wandb_project", "run_name", "eval_tokens",
}  # fmt: skip

PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "safetensors", "numpy", "mamba-ssm", "causal-conv1d", "triton", "wandb")


class RunFolder:
    """Paths of one run, and the checks before anything is written there."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.record_file = self.path / "run.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.summary_file = self.path / "summary.json"

    def check(self, options: TrainOptions) -> None:
        """Refuse to write over another run, or to resume one under options that would make it another.

        Raises InputError.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--output_dir={self.path} is a file; name a folder")
        if not self.record_file.is_file():
            if self.path.is_dir() and not all(map(is_temporary_file, self.path.iterdir())):
                raise InputError(f"--output_dir={self.path} is not empty and holds no run; name another folder")
            return
        if not options.resume:
            found = complete_checkpoints(self.checkpoints)
            state = f"a run with checkpoint {found[0].name}" if found else "a run without a checkpoint"
            raise InputError(f"--output_dir={self.path} holds {state}; go on with it by --resume, or name another folder")
        before = self.read_record()["options"]
        now = _plain(dataclasses.asdict(options))
        changed = [name for name in now if name in before and name not in MAY_CHANGE and before[name] != now[name]]
        if changed:
            pairs = ", ".join(f"--{name} {before[name]} (now {now[name]})" for name in changed)
            raise InputError(f"--resume of {self.path}: the run was started with {pairs}; use these again, or a new --output_dir")

    def read_record(self) -> dict:
        """Contents of run.json.  Raises InputError if it cannot be read."""
        try:
            return read_json(self.record_file)
        except (OSError, ValueError) as error:
            raise InputError(f"{self.record_file} cannot be read: {error}; name a run folder") from None

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
            record["history"] = [*history, before]
        remove_temporary_files(self.path)
        write_json(self.record_file, record)


def _plain(value):
    """As JSON gives it back."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def code_version() -> dict[str, str | None]:
    """Version of megahedge and, in a git checkout, its commit with `-dirty` where files differ from it."""
    import megahedge

    folder = Path(megahedge.__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {"version": megahedge.__version__, "git_commit": commit}


def package_versions() -> dict[str, str | None]:
    """Installed versions of the packages that can change a result; None for those that are absent."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions
