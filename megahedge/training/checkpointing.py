"""Saving and restoring a run: fp32 masters and moments in full shapes, and where the run stands.

The files say nothing of ranks, ZeRO or TP, so any topology reads what any other wrote.
"""

import dataclasses
import functools
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from megahedge.checkpoint.store import (
    Checkpoint,
    CheckpointWriter,
    best_checkpoint,
    complete_checkpoints,
    forget_best_after,
    mark_best,
    newest_sound,
    remove_unfinished,
    rotate,
    step_of,
)
from megahedge.config.options import RunOptions
from megahedge.parallel.sharding import full_numel, load_parameters
from megahedge.training.distributed import on_first_rank
from megahedge.training.engine import MOMENTS, TrainingEngine
from megahedge.utils.errors import InputError
from megahedge.utils.files import free_bytes
from megahedge.utils.logging import get_logger, log_agreed
from megahedge.utils.units import format_bytes

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands.  Everything that the next step depends on, besides parameters and moments, follows from it."""

    step: int = 0
    """Optimizer steps taken or skipped; the learning rate and the random state of a step are functions of it."""
    samples: int = 0
    """Samples consumed; the next one is sample number `samples` of the data order."""
    tokens: int = 0
    """Tokens consumed."""
    updates: int = 0
    """Steps whose update was applied; AdamW's bias correction counts these."""
    skipped_in_a_row: int = 0
    """Non-finite steps since the last applied one."""
    evaluation_due: bool = False
    """The evaluation that belongs to this step was put off, because a stop was asked for and the checkpoint came first."""

    def finished(self, total_steps: int) -> bool:
        """Whether nothing is left of a run of `total_steps`."""
        return self.step == total_steps and not self.evaluation_due


Read = Callable[[str], Tensor]
"""Gives a whole tensor by the name of its parameter."""


@dataclasses.dataclass(frozen=True)
class Extras:
    """What a checkpoint holds besides what trains; both are asked on rank 0 alone."""

    read_frozen: Read | None = None
    """Frozen parameters as exactly as they were given, where the module may hold them rounded; None where all parameters train."""
    make_probe: Callable[[Read], dict[str, Tensor]] | None = None
    """Makes the tensors of the group `probe` from the parameters as they were written."""


def save_checkpoint(
    engine: TrainingEngine, student: nn.Module, root: Path, progress: Progress, record: dict, keep_last: int, extras: Extras = Extras()
) -> bool:
    """Write a checkpoint of the whole student.  Collective; rank 0 writes.  Returns whether it was written.

    A failure to write is reported and leaves the run and the older checkpoints as they are.
    """
    sink = _Sink(root, progress.step, checkpoint_bytes(student), extras) if dist.get_rank() == 0 else _Nothing()
    for name, _ in student.named_parameters():
        if name not in engine.parameters:
            sink.add_frozen(name)
            continue
        sink.add("parameters", name, engine.read_full(name))
        for moment in MOMENTS:
            sink.add("optimizer", f"{name}.{moment}", engine.read_full(name, moment))
    sink.finish(record | {"progress": dataclasses.asdict(progress)}, keep_last)
    outcome = [sink.error]
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        log_agreed(logger, logging.ERROR, "checkpoint at step %d was NOT written: %s; older ones are untouched", progress.step, outcome[0])
    return outcome[0] is None


def checkpoint_bytes(student: nn.Module) -> int:
    """Size of a checkpoint, but for its manifest and what a stage adds: fp32 parameters, and two moments of those that train."""
    return sum(4 * full_numel(parameter) * (3 if parameter.requires_grad else 1) for parameter in student.parameters())


def missing_room(root: Path, size: int, options: RunOptions) -> str | None:
    """What to tell where the disk has no room for the checkpoints to come in the folder `root`; None where it has.

    size: of one checkpoint in bytes.  Each is looked at again before it is written.
    """
    # one more than are kept, as an old one goes when the new one is whole
    coming = options.keep_last + options.keep_best + 1 - len(complete_checkpoints(root))
    free = free_bytes(root)
    if free >= coming * size:
        return None
    kept = f"--keep_last={options.keep_last}{' with --keep_best' if options.keep_best else ''}"
    return (
        f"a checkpoint takes {format_bytes(size)}, and {kept} needs room for {coming} more; {root.parent} has {format_bytes(free)} free: "
        "make room, or saves will fail"
    )


class BestCheckpoint:
    """Keeps the checkpoint with the lowest validation loss of a run.  Made and called on all ranks; rank 0 decides and writes."""

    def __init__(self, root: Path, keep_last: int, loss_at: Callable[[int], float | None]):
        """loss_at: the validation loss of a step of earlier starts, asked on rank 0; None where it is not known."""
        self._root, self._keep_last = root, keep_last
        best = best_checkpoint(root) if dist.get_rank() == 0 else None
        self._loss = loss_at(step_of(best)) if best is not None else None

    def consider(self, step: int, loss: float, is_written: bool, save: Callable[[], bool]) -> None:
        """Keep the checkpoint of this step if its loss is the lowest so far; `save` writes it where it is not written yet."""
        is_best = on_first_rank(lambda: math.isfinite(loss) and (self._loss is None or loss < self._loss), "comparing losses")
        if is_best and (is_written or save()):
            on_first_rank(lambda: self._keep(step, loss), f"keeping the best checkpoint in {self._root}")

    def _keep(self, step: int, loss: float) -> None:
        """What the disk refuses is told and costs the link, not the run."""
        try:
            mark_best(self._root, step)
            self._loss = loss
            rotate(self._root, self._keep_last, step)
        except OSError as error:
            logger.error("%s/best could not be made to name step %d, or an older one not be removed: %s", self._root, step, error)
            return
        logger.info("step %d has the lowest validation loss so far: its checkpoint is kept", step)


class _Nothing:
    """The sink of ranks that do not write."""

    error = None

    def add(self, group, name, tensor):
        """Drop the tensor."""

    def add_frozen(self, name):
        """Read nothing."""

    def finish(self, record, keep_last):
        """Nothing was collected."""


class _Sink:
    """A CheckpointWriter that remembers its first failure instead of leaving other ranks waiting in a collective."""

    def __init__(self, root: Path, step: int, size: int, extras: Extras):
        self.error: str | None = None
        self._writer = None
        self._extras = extras
        self._root, self._step = root, step
        self._attempt(self._open, size)

    def _open(self, size):
        self._writer = CheckpointWriter(self._root, self._step)
        free = shutil.disk_usage(self._root).free
        if free < size:
            raise OSError(f"it takes {format_bytes(size)}, and {self._root} has {format_bytes(free)} free")

    def _attempt(self, action, *arguments):
        if self.error is None:
            try:
                action(*arguments)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
                if self._writer is not None:
                    self._writer.abandon()

    def add(self, group, name, tensor):
        """Add a tensor unless something has failed before."""
        self._attempt(lambda: self._writer.add(group, name, tensor))

    def add_frozen(self, name):
        """Add a parameter that does not train, from where its exact values are."""
        self._attempt(lambda: self._writer.add("parameters", name, self._extras.read_frozen(name)))

    def _add_probe(self):
        for name, tensor in self._extras.make_probe(functools.partial(self._writer.read, "parameters")).items():
            self._writer.add("probe", name, tensor)

    def finish(self, record, keep_last):
        """Make the checkpoint visible and remove old ones."""
        if self._extras.make_probe is not None:
            self._attempt(self._add_probe)
        self._attempt(lambda: self._writer.finish(record))
        if self.error is None:
            try:
                rotate(self._root, keep_last, self._step)
            except OSError as error:
                logger.error("an old checkpoint in %s could not be removed: %s", self._root, error)


def find_checkpoint(root: Path) -> Checkpoint | None:
    """The checkpoint to go on from, the same on every rank; None where there has never been one.

    Collective: rank 0 looks and cleans up.  Raises InputError, on every rank, where there are checkpoints but none is sound.
    """

    def look() -> Path | None:
        remove_unfinished(root)
        newest, count = newest_sound(root), len(complete_checkpoints(root))
        if newest is not None:
            forget_best_after(root, newest.step)
        if newest is None and count > 0:
            raise InputError(
                f"--resume: all {count} checkpoints in {root} are damaged; put a sound one there, or start in a new --output_dir"
            )
        return newest.path if newest else None

    path = on_first_rank(look, f"looking for a checkpoint in {root}")
    return Checkpoint(path) if path else None


def load_student(student: nn.Module, checkpoint: Checkpoint) -> None:
    """Fill the student's parameters from a checkpoint, before the engine is made; each rank reads its own pieces."""
    load_parameters(student, lambda name, index: checkpoint.read("parameters", name, index), student.tensor_parallel)


def restore_optimizer(engine: TrainingEngine, checkpoint: Checkpoint, progress: Progress) -> None:
    """Set masters, moments and the update count; the module's own parameters are those of `load_student`."""
    for name in engine.parameters:
        engine.write(name, functools.partial(checkpoint.read, "parameters", name))
        for moment in MOMENTS:
            engine.write(name, functools.partial(checkpoint.read, "optimizer", f"{name}.{moment}"), moment)
    engine.set_update_count(progress.updates)
