"""Tiny runs of both stages, from a teacher that is pretrained here, and worlds that make many of them."""

import contextlib
import dataclasses
import functools
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megahedge.checkpoint.store import MANIFEST, CheckpointWriter
from megahedge.checkpoint.store import _manifest_digest as manifest_digest
from megahedge.config.options import PretrainOptions, Stage1Options, Stage2Options, read_recipe
from megahedge.models.mixers import decay, hedge_mamba
from megahedge.parallel.sharding import Init
from megahedge.stages.pretrain import pretrain
from megahedge.stages.stage1 import stage1
from megahedge.stages.stage2 import stage2
from megahedge.utils.errors import InputError, RunError
from megahedge.utils.files import read_json_object, write_json
from tests.training.runs import GLOBAL_BATCH_SIZE, MODEL, SEQ_LEN, arguments, checkpoint_at, copy_crashed, make_inputs

STEPS, HALF = 8, 4
"""Steps of a run, and those after which it saves and evaluates."""
TEACHER_STEPS = 20
TOKENS_PER_STEP = SEQ_LEN * GLOBAL_BATCH_SIZE
COMMANDS = {0: (PretrainOptions, pretrain), 1: (Stage1Options, stage1), 2: (Stage2Options, stage2)}


@dataclasses.dataclass(frozen=True)
class StageRun:
    """A run of a stage (of pretraining, where that is 0) to make, in a folder of its name."""

    name: str
    stage: int
    recipe: str | None
    changes: dict = dataclasses.field(default_factory=dict)
    """Options other than those of the recipe at the tests' sizes; folders are named from the inputs' folder on."""
    resumes: str | None = None
    """Go on from a copy of that run as a crash after the checkpoint of step `resumes_at` would have left it."""
    prepare: Callable[[Path], None] | None = None
    """Changes files below the inputs' folder before the run."""
    mutant: str | None = None
    """One of MUTANTS, alive during the run."""
    resumes_at: int = HALF
    """See `resumes`."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    error: str | None
    """Type and message of the InputError or RunError, if one did."""
    log: tuple[str, ...]
    """Log lines of rank 0."""


TEACHER = "pretrained/hf"
PLACES = ("teacher", "init_from", "ds_config", "model_config")


def make_stage_inputs(folder: Path) -> None:
    """Corpus and tokenizer, and configs of teachers whose mixers weigh as much as the rest of them from the start."""
    make_inputs(folder)
    (folder / "teacher.json").write_text(json.dumps(MODEL | {"initializer_range": 0.2}))
    (folder / "tied-teacher.json").write_text(json.dumps(MODEL | {"initializer_range": 0.2, "tie_word_embeddings": True}))


def stage_options(folder: Path, run: StageRun) -> dict:
    """All options of a run by name."""
    if run.stage == 0:
        return arguments(folder, run.name, train_tokens=TEACHER_STEPS * TOKENS_PER_STEP) | _with_places(folder, run.changes)
    recipe = read_recipe(run.recipe)[f"stage{run.stage}"]
    sizes = {"train_tokens": STEPS * TOKENS_PER_STEP, "eval_interval": HALF, "save_interval": HALF, "recipe": run.recipe}
    sizes |= {"micro_batch_size": 4}  # two passes a step on one replica, one on two: most of the time of these runs is passes
    if run.stage == 1:
        rates = {"teacher": TEACHER, "lr": 1e-2}
    else:
        rates = {"lr": 2e-3} | ({"lr_new": 1e-2} if recipe["lr_new"] else {})
    values = recipe | arguments(folder, run.name) | sizes | rates | run.changes
    del values["model_config"]
    return _with_places(folder, values)


def _with_places(folder: Path, values: dict) -> dict:
    return values | {name: str(folder / values[name]) for name in PLACES if values.get(name)}


def make_stage_runs(folder: Path, runs: list[StageRun]) -> dict[str, Outcome]:
    """Make every run, one after the other in this process."""
    return {run.name: _make_run(folder, run) for run in runs}


def _make_run(folder: Path, run: StageRun) -> Outcome:
    if dist.get_rank() == 0:
        if run.resumes is not None:
            copy_crashed(folder / run.resumes, folder / run.name, run.resumes_at)
        if run.prepare is not None:
            run.prepare(folder)
    dist.barrier()
    options_type, command = COMMANDS[run.stage]
    options = options_type(**stage_options(folder, run) | ({"resume": True} if run.resumes else {}))
    error = None
    with _captured() as lines, MUTANTS[run.mutant]():
        try:
            command(options)
        except (InputError, RunError) as caught:
            error = f"{type(caught).__name__}: {caught}"
    log = [lines]
    dist.broadcast_object_list(log, src=0)
    return Outcome(error, tuple(log[0]))


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """The lines that this process logs within `with`."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megahedge")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


# ---- students that are not what stage 1 has learnt ------------------------------------------------------------------------------


def _one_tap_early(shape):
    weight = torch.zeros(shape)
    weight[:, -2] = 1.0
    return weight


@contextlib.contextmanager
def _rates_not_quite_zero():
    original = decay.Rate.__init__

    def changed(self, *arguments):
        original(self, *arguments)
        self.weight.init = Init(constant=1e-3)

    with mock.patch.object(decay.Rate, "__init__", changed):
        yield


MUTANTS = {
    None: contextlib.nullcontext,
    "gate": functools.partial(mock.patch.object, hedge_mamba, "GATE_OFFSET", 1.0),
    "gate-bf16": functools.partial(mock.patch.object, hedge_mamba, "GATE_OFFSET", 1.28125),
    "tap": functools.partial(mock.patch.object, hedge_mamba, "last_tap", _one_tap_early),
    "rate": _rates_not_quite_zero,
}


# ---- files that are not what they were ------------------------------------------------------------------------------------------


def write_other_teacher(folder: Path) -> None:
    """`other-teacher`: the teacher, but for one weight."""
    copy = shutil.copytree(folder / TEACHER, folder / "other-teacher")
    tensors = load_file(copy / "model.safetensors")
    tensors["gpt_neox.layers.0.attention.dense.weight"][0, 0] += 0.01
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})


def write_broken_teacher(folder: Path) -> None:
    """`broken-teacher`: the teacher with one weight that is no number."""
    copy = shutil.copytree(folder / TEACHER, folder / "broken-teacher")
    tensors = load_file(copy / "model.safetensors")
    tensors["gpt_neox.layers.0.attention.dense.weight"][0, 0] = float("nan")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})


def write_unfinished(folder: Path) -> None:
    """A run of stage 1 that was stopped before its end."""
    shutil.copytree(folder / "tuned-1-zero1", folder / "unfinished")
    (folder / "unfinished" / "summary.json").unlink()


def write_moved(folder: Path) -> None:
    """`moved`: copies of the teacher and of the run `tuned-1-zero1`."""
    shutil.copytree(folder / TEACHER, folder / "moved" / "teacher")
    shutil.copytree(folder / "tuned-1-zero1", folder / "moved" / "stage1")


def write_older_version(folder: Path) -> None:
    """`older-version`: the run of that name as a version left it that knew neither a bypass nor mixers to choose from."""
    run = folder / "older-version"
    record = read_json_object(run / "run.json")
    path = checkpoint_at(run, HALF).path / MANIFEST
    manifest = {key: value for key, value in read_json_object(path).items() if key != "sha256"}
    for facts in (record, manifest["record"]):
        del facts["model"]["mixer"]["bypass"], facts["origin"]["handover_proven"]
    del record["options"]["bypass"], record["options"]["mixer"]
    write_json(run / "run.json", record)
    write_json(path, manifest | {"sha256": manifest_digest(manifest)})


def write_other_probe(folder: Path) -> None:
    """`other-probe`: the last checkpoint of `tuned-1-zero1`, whole and sound, with a probe of logits that are a little others."""
    source = checkpoint_at(folder / "tuned-1-zero1", STEPS)
    writer = CheckpointWriter(folder / "other-probe" / "checkpoints", STEPS)
    for group in ("parameters", "optimizer", "probe"):
        for name in source.names(group):
            tensor = source.read(group, name)
            writer.add(group, name, tensor + 1e-3 * torch.cos(100 * tensor) if name == "logits" else tensor)
    writer.finish(source.record)


def write_damaged(folder: Path) -> None:
    """`damaged`: the run `tuned-1-zero1`, of whose last parameters one byte is another."""
    copy = shutil.copytree(folder / "tuned-1-zero1", folder / "damaged")
    path = checkpoint_at(copy, STEPS).path / "parameters-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
