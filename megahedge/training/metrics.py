"""metrics.jsonl, and Weights & Biases when asked."""

import importlib.util
import json
import os
import secrets
from pathlib import Path

from megahedge.training.timing import PARTS
from megahedge.utils.errors import InputError
from megahedge.utils.files import atomic_write, finite_or_none
from megahedge.utils.logging import get_logger

logger = get_logger(__name__)

# What differs between two runs of the same computation.
TIMING_KEYS = ("tokens_per_second", "elapsed_seconds", "tflops", "mfu", "peak_memory_gib", *(f"seconds_{part}" for part in PARTS))


def read_metrics(path: Path) -> list[dict]:
    """Lines of a metrics file; a last line that a kill cut short is left out, and lines that are none of ours with a warning."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    readable = [entry for entry in map(_parse_line, lines) if entry is not None]
    if len(readable) < len(lines):
        logger.warning("%s: %d lines cannot be read and are left out", path, len(lines) - len(readable))
    return readable


def has_evaluation(path: Path, step: int) -> bool:
    """Whether the file holds the evaluation of that step."""
    return any((line["kind"], line["step"]) == ("eval", step) for line in read_metrics(path))


def loss_of_evaluation(path: Path, step: int) -> float | None:
    """The validation loss that the file holds of that step; None where it holds none, or it was not finite."""
    return next((line.get("loss") for line in read_metrics(path) if (line["kind"], line["step"]) == ("eval", step)), None)


def _parse_line(line: str) -> dict | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    sound = isinstance(entry, dict) and isinstance(entry.get("kind"), str) and type(entry.get("step")) is int
    return entry if sound else None


def check_wandb(project: str | None) -> None:
    """Raise InputError where Weights & Biases is asked for and not installed."""
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise InputError(f"--wandb_project={project} needs the package wandb: pip install wandb")


class MetricsLog:
    """Appends one JSON object a line.  Made on rank 0 only.

    On resume, lines after `resumed_step` belong to steps that will be run again and are dropped, at step 0 all lines; so is the
    evaluation at that step if it will be made again (`evaluation_due`).  A disk that refuses a line ends the log, not the run.
    """

    def __init__(self, path: Path, resumed_step: int, evaluation_due: bool = False):
        kept = [line for line in read_metrics(path) if line["step"] <= resumed_step] if resumed_step > 0 else []
        if evaluation_due:
            kept = [line for line in kept if (line["kind"], line["step"]) != ("eval", resumed_step)]
        with atomic_write(path, "w") as handle:
            handle.writelines(json.dumps(line) + "\n" for line in kept)
        self._handle = open(path, "a", encoding="utf-8")  # noqa: SIM115 (lives as long as the run)
        self._path = path
        self._wandb = None

    def start_wandb(self, project: str, name: str, config: dict, id_file: Path) -> None:
        """Log to Weights & Biases too, under the id that the run had before, if it had one."""
        import wandb

        if not id_file.is_file():
            with atomic_write(id_file, "w") as handle:
                handle.write(secrets.token_hex(4) + "\n")
        identifier, folder = id_file.read_text().strip(), os.fspath(id_file.parent)
        try:
            self._wandb = wandb.init(project=project, name=name, id=identifier, resume="allow", config=config, dir=folder)
        except wandb.Error as error:
            raise InputError(f"--wandb_project={project}: {error}; log in, or set WANDB_MODE=offline") from None

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        """Append one line: kind is `train` or `eval`; a value that is not finite is null there."""
        if self._handle is not None:
            try:
                self._handle.write(json.dumps({"kind": kind, "step": step, **finite_or_none(values)}) + "\n")
                self._handle.flush()
            except OSError as error:
                logger.error("%s can no longer be written (%s); the run goes on without it", self._path, error)
                self._handle = None
        if self._wandb is not None:
            self._wandb.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def reopen(self) -> None:
        """Go on in a new file, where the one that was open is no longer the one of that name."""
        if self._handle is not None:
            self._handle.close()
            self._handle = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (lives as long as the run)

    def close(self) -> None:
        """Close the file and the Weights & Biases run."""
        if self._handle is not None:
            self._handle.close()
        if self._wandb is not None:
            self._wandb.finish()
