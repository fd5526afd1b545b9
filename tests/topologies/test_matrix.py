"""tp_size × ZeRO × offload × stage × recomputation on two or four processes: one computation, however cut, wherever it moves to."""

import contextlib
import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from megahedge.stages import pretrain, stage1, stage2
from megahedge.stages.base import run_stage
from megahedge.training.checkpointing import save_checkpoint
from tests.stages.runs import StageRun, make_stage_inputs, make_stage_runs
from tests.training.runs import GLOBAL_BATCH_SIZE, MODEL, SEQ_LEN, checkpoint_at, differing, ds_config, measured
from tests.worlds import Worlds

pytestmark = pytest.mark.slow
STEPS = 10
STAGES = (0, 1, 2)
"""0 is pretraining."""
TP_SIZES = (1, 2, 4)
ZERO = ("zero0", "zero1", "zero2", "zero3")
KEPT, RECOMPUTED = "kept", "recomputed"
"""Activations."""
CUTS = (*itertools.product(ZERO, (KEPT, RECOMPUTED)),)
OFFLOADED = (("zero2_offload", KEPT), ("zero3_offload", RECOMPUTED))
"""With a tp_size of 2, in two replicas."""
TEACHER = "teacher-0-reference"
STARTS = {"0": {"model_config": "heads.json"}, "1": {"teacher": f"{TEACHER}/hf"}, "2": {"init_from": "1-reference"}}
MATRIX = [
    f"{stage}-tp{tp_size}-{zero}-{kept}"
    for stage, tp_size in itertools.product(STAGES, TP_SIZES)
    for zero, kept in (*CUTS, *(OFFLOADED if tp_size == 2 else ()))
]


def _run(inputs: Path, name: str, called: str | None = None, **changes) -> StageRun:
    """STAGE-CUT of the matrix, by name; `reference` is the cut of one process."""
    stage, *cut = name.split("-")
    # with the usual 1e-8 AdamW makes of rounding, in elements whose gradient is near 0, steps of full size
    own = {"train_tokens": STEPS * SEQ_LEN * GLOBAL_BATCH_SIZE, "eval_interval": STEPS, "save_interval": STEPS // 2, "adam_eps": 1e-4}
    own |= STARTS[stage]
    if cut != ["reference"]:
        tp, zero, kept = cut
        own["ds_config"] = str(inputs / f"{zero}.json") if zero.startswith("zero3") else ds_config(zero)
        tp_size = int(tp.removeprefix("tp"))
        # as few passes as dp allows, but two a step where ranks hold whole layers: accumulation is part of what is cut
        micro_batch_size = {1: GLOBAL_BATCH_SIZE // 4, 2: GLOBAL_BATCH_SIZE // 2, 4: GLOBAL_BATCH_SIZE}[tp_size]
        own |= {"tp_size": tp_size, "activation_checkpointing": kept == RECOMPUTED, "micro_batch_size": micro_batch_size}
    return StageRun(called or name, int(stage), "tuned" if stage != "0" else None, own | changes)


MOVES = (
    (1, {"ds_config": ds_config("zero2"), "micro_batch_size": 4, "stop_after": 3}),
    (2, {"ds_config": ds_config("zero1"), "micro_batch_size": 2, "stop_after": 5}),
    (4, {"ds_config": "zero3.json", "micro_batch_size": 1, "tp_size": 2, "stop_after": 6}),
    (4, {"ds_config": ds_config("zero1"), "micro_batch_size": 4, "tp_size": 4, "stop_after": 8}),
    (1, {"ds_config": ds_config("zero3"), "micro_batch_size": 2}),
)
"""Processes and options of each start of a run that goes on somewhere else every time: dp 1, 2, 2, 1, 1; tp 1, 1, 2, 4, 1."""
COPIES = ((1, 1), (4, 2), (4, 4), (1, 1))
"""Processes and tp_size of each job that loads what the one before has saved, and saves it again."""


def _moving(inputs: Path, number: int) -> list[StageRun]:
    """The start `number` of the moving run of each stage."""
    runs = []
    for stage in STAGES:
        changes = MOVES[number][1] | {"output_dir": str(inputs / f"{stage}-moving"), "resume": number > 0}
        runs.append(_run(inputs, f"{stage}-reference", called=f"{stage}-moving-{number}", **changes))
    return runs


def _copies(inputs: Path, number: int) -> list[StageRun]:
    """The job `number` of each stage's chain of copies, which begins with the checkpoint half-way of the run of one process."""
    runs = []
    for stage in STAGES:
        before = f"{stage}-copy-{number - 1}" if number else f"{stage}-reference"
        run = _run(inputs, f"{stage}-reference", f"{stage}-copy-{number}", tp_size=COPIES[number][1], stop_after=STEPS // 2)
        runs.append(dataclasses.replace(run, resumes=before, resumes_at=STEPS // 2))
    return runs


def _make(inputs: Path, runs: list[StageRun]) -> dict:
    outcomes = {}
    for run in runs:
        with _saving_again(inputs / run.name) if "-copy-" in run.name else contextlib.nullcontext():
            outcomes |= make_stage_runs(inputs, [run])
        assert outcomes[run.name].error is None, outcomes[run.name].error
    return outcomes


@contextlib.contextmanager
def _saving_again(folder: Path) -> Iterator[None]:
    """Within `with`, a run that has taken no step replaces the checkpoints that it has found by one of its own."""

    def run_and_save(stage_type, plan):
        before = checkpoint_at(folder, STEPS // 2).record
        stage, engine, progress = run_stage(stage_type, plan)
        if dist.get_rank() == 0:
            shutil.rmtree(plan.run.checkpoints)
        record = {key: value for key, value in before.items() if key != "progress"}
        assert save_checkpoint(engine, stage.student, plan.run.checkpoints, progress, record, keep_last=1, extras=stage.extras(plan))
        return stage, engine, progress

    with contextlib.ExitStack() as patches:
        for module in (pretrain, stage1, stage2):
            patches.enter_context(mock.patch.object(module, "run_stage", run_and_save))
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Corpus, tokenizer and the config of a model of four heads; runs are made here."""
    folder = tmp_path_factory.mktemp("matrix")
    make_stage_inputs(folder)
    (folder / "heads.json").write_text(json.dumps(MODEL | {"num_attention_heads": 4, "initializer_range": 0.2}))
    for name in ("zero3", "zero3_offload"):  # by default ZeRO-3 keeps parameters as small as ours whole on every rank
        config = json.loads(Path(ds_config(name)).read_text())
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
        (folder / f"{name}.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def made(inputs) -> Worlds:
    """`made(name)` is the folder of a run.  In a world tensor parallelism comes last, as DeepSpeed keeps an mpu while a process lives."""
    references = [_run(inputs, f"{stage}-reference") for stage in STAGES]
    teacher = _run(inputs, "0-reference", called=TEACHER, train_tokens=2 * STEPS * SEQ_LEN * GLOBAL_BATCH_SIZE)
    moving = [_moving(inputs, number) for number in range(len(MOVES))]
    copies = [_copies(inputs, number) for number in range(len(COPIES))]
    worlds = [
        (1, [teacher, *references]),
        (1, [*moving[0], *copies[0]]),
        (2, moving[1]),
        (4, [*moving[2], *copies[1], *moving[3], *copies[2]]),
        (1, [*moving[4], *copies[3]]),
        *((max(2, tp_size), [_run(inputs, name) for name in MATRIX if f"-tp{tp_size}-" in name]) for tp_size in TP_SIZES),
    ]
    return Worlds(inputs, worlds, _make)


def _curves(run: Path, key: str) -> np.ndarray:
    return np.array([line[key] for line in measured(run, "train")])


def _assert_same_curves(run: Path, reference: Path) -> None:
    """Losses within 1e-4 and gradient norms within 1e-5: other orders of the same sums, through ten updates."""
    assert len(_curves(reference, "loss")) == STEPS
    np.testing.assert_allclose(_curves(run, "loss"), _curves(reference, "loss"), rtol=0, atol=1e-4)
    np.testing.assert_allclose(_curves(run, "grad_norm"), _curves(reference, "grad_norm"), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", MATRIX)
def test_every_cut_follows_the_curve_of_one_process(name, made):
    _assert_same_curves(made(name), made(f"{name[0]}-reference"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_may_change_its_topology_and_micro_batch_at_every_start(stage, made):
    run = made(f"{stage}-moving-{len(MOVES) - 1}").with_name(f"{stage}-moving")
    _assert_same_curves(run, made(f"{stage}-reference"))
    assert list(_curves(run, "tokens")) == list(_curves(made(f"{stage}-reference"), "tokens"))
    assert [start["topology"]["tp_size"] for start in json.loads((run / "run.json").read_text())["history"]] == [1, 1, 2, 4]


@pytest.mark.parametrize("stage", STAGES)
def test_saving_what_was_loaded_changes_nothing_whatever_the_cut(stage, made):
    """Parameters and moments, through tp 1, 2, 4 and 1 again."""
    source = checkpoint_at(made(f"{stage}-reference"), STEPS // 2)
    for number in range(len(COPIES)):
        assert differing(checkpoint_at(made(f"{stage}-copy-{number}"), STEPS // 2), source) == [], COPIES[number]
