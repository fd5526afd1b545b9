"""One folder of inputs for the session, and the runs that tests look at, made world by world."""

from pathlib import Path

import pytest

from tests.training.runs import (
    GLOBAL_BATCH_SIZE,
    SEQ_LEN,
    STEPS,
    Poison,
    PretrainReleased,
    PretrainWithOddMetrics,
    PretrainWithoutEnd,
    PretrainWithoutStart,
    PretrainWithUnusedParameter,
    Run,
    arguments,
    ds_config,
    make_inputs,
    make_runs,
)
from tests.worlds import Worlds

ZERO = ("zero0", "zero1", "zero2", "zero3")
OFFLOAD = ("zero2_offload", "zero3_offload")
PEAK_TFLOPS = 0.5
"""Said of a device that nobody knows."""
LONG_STEPS = 80
"""More than a run takes between thirty kills."""
FEW_STEPS = 4
"""Fewer than the bad steps in a row that end a run."""
SKIPPED = (3, 4)
"""Steps at which poisoned runs meet a NaN: in the loss, then in a gradient."""
SKIPPED_AT_START = (1, 2, 3, 4, 5)
"""Steps skipped by runs whose first checkpoint, of step 5, shall hold the starting values."""


def _with_resumed(run: Run) -> list[Run]:
    """A run, and a copy of it that goes on from step 10."""
    return [run, Run(f"{run.name}-resumed", run.changes | {"resume": True}, copied_from=run.name)]


def _halves(name: str) -> list[Run]:
    changes = {"ds_config": ds_config(name), "run": f"{name}-halves"}
    return [Run(f"{name}-half", changes | {"stop_after": 10}), Run(f"{name}-halves", changes | {"resume": True})]


def _bf16(name: str) -> list[Run]:
    changes = {"ds_config": ds_config(name), "dtype": "bf16", "save_interval": 5}
    return _with_resumed(Run(f"{name}-bf16", changes, poison=Poison(("loss",), SKIPPED_AT_START, rank=0)))


def _poisoned(name: str) -> list[Run]:
    changes = {"ds_config": ds_config(name), "save_interval": 2}
    return _with_resumed(Run(f"{name}-poisoned", changes, poison=Poison(("loss", "gradient"), SKIPPED, rank=1)))


def _odd(inputs: Path, name: str) -> list[Run]:
    changes = {"ds_config": ds_config(name), "save_interval": 5, "dtype": "bf16", "model_config": str(inputs / "odd.json")}
    return _with_resumed(Run(f"{name}-odd", changes, poison=Poison(("gradient",), SKIPPED_AT_START, rank=1)))


def _tp2(name: str, **changes) -> Run:
    return Run(f"{name}-tp2", {"ds_config": ds_config(name), "tp_size": 2} | changes)


def _stopped(name: str, step: int) -> list[Run]:
    """A run that is asked to stop in the step, and a copy of it that goes on."""
    changes = {"save_interval": 1000}
    return [
        Run(name, changes, stop_in_step=step),
        Run(f"{name}-resumed", changes | {"resume": True}, copied_from=name, crashed_after=None),
    ]


RELEASED_FAST = ("released-dp2-untied-recomputed", "released-tp2-tied-kept")
RELEASED = (*RELEASED_FAST, "released-dp2-untied-kept", "released-dp2-tied-recomputed", "released-tp2-untied-recomputed")
"""Ten steps under a ZeRO-3 that keeps no parameter whole: how two processes share it, its embeddings, its activations; every pair of these
in some run."""


def _released(inputs: Path, cut: str, fast: bool) -> list[Run]:
    """Those runs of a cut that are of the fast tier, or the others; each with a copy of it that goes on from step 5."""
    runs = []
    for name in RELEASED:
        _, its_cut, ends, kept = name.split("-")
        changes = {
            "ds_config": str(inputs / "zero3_released.json"),
            "tp_size": 2 if cut == "tp2" else 1,
            "model_config": str(inputs / ("tied.json" if ends == "tied" else "model.json")),
            "activation_checkpointing": kept == "recomputed",
            "stop_after": 10,
            "save_interval": 5,
            "micro_batch_size": 4,
        }
        if its_cut == cut and (name in RELEASED_FAST) == fast:
            runs.append(Run(name, changes, stage=PretrainReleased))
            runs.append(Run(f"{name}-resumed", changes | {"resume": True}, copied_from=name, crashed_after=5))
    return runs


def _fast_one(inputs: Path) -> list[Run]:
    runs = [Run(name, {"ds_config": ds_config(name)}) for name in ZERO]
    runs += [Run(name, {"ds_config": ds_config(name), "stop_after": 10}) for name in OFFLOAD]
    runs.append(Run("timed", {"log_interval": 4, "peak_tflops": PEAK_TFLOPS}))
    runs.append(Run("recomputing", {"stop_after": 10, "activation_checkpointing": True}))
    runs.append(Run("tied", {"stop_after": 10, "model_config": str(inputs / "tied.json")}))
    runs.append(Run("trained-on", {"init_from": str(inputs / "zero1" / "hf"), "model_config": None, "stop_after": 2}))
    runs.append(Run("moving-start", {"run": "moving", "ds_config": ds_config("zero3"), "stop_after": 6}))
    runs.append(Run("diverged", {}, stage=PretrainWithoutEnd, expected_error="it has diverged"))
    runs.append(Run("broken-start", {}, stage=PretrainWithoutStart, expected_error="nan before the first step"))
    runs += [*_halves("zero1"), *_halves("zero3"), *_bf16("zero1"), *_bf16("zero3")]
    best = {"eval_interval": 2, "save_interval": 5, "keep_last": 1, "keep_best": True}
    runs.append(Run("best", best, best_at=8))
    runs.append(Run("best-half", best | {"run": "best-halves", "stop_after": 13}, best_at=8))
    runs.append(Run("best-halves", best | {"resume": True}, best_at=8))
    runs.append(Run("no-room", {"save_interval": 2, "stop_after": 6}, full_until_save=2))
    for name in ("zero1", "zero3"):
        runs.append(
            Run(f"{name}-unused", {"ds_config": ds_config(name)}, stage=PretrainWithUnusedParameter, expected_error="got no gradient")
        )
    return runs


def _slow_one(inputs: Path) -> list[Run]:
    return [*_halves("zero0"), *_halves("zero2"), *_bf16("zero0"), *_bf16("zero2")]


def _fast_two(inputs: Path) -> list[Run]:
    runs = [Run(f"{name}-dp2", {"ds_config": ds_config(name)} | ({} if name == "zero1" else {"stop_after": 10})) for name in ZERO]
    runs += [*_poisoned("zero1"), *_poisoned("zero3"), *_odd(inputs, "zero3")]
    ten_bad = Poison(("loss",), tuple(range(4, 20)), rank=1)
    runs.append(Run("all-bad", {"ds_config": ds_config("zero2")}, poison=ten_bad, expected_error="10 steps in a row"))
    never = Poison(("loss",), tuple(range(1, STEPS + 1)), rank=0)
    few = {"train_tokens": FEW_STEPS * SEQ_LEN * GLOBAL_BATCH_SIZE, "ds_config": ds_config("zero1")}
    runs.append(Run("nothing-learnt", few, poison=never, expected_error="nothing was learnt"))
    runs.append(Run("disk-full", {"save_interval": 2, "stop_after": 6}, failing_save=4))  # two files a save: the second save's second
    last_save = {"save_interval": 3, "stop_after": 6}
    runs.append(Run("last-save-lost", last_save, failing_save=4, expected_error="its checkpoint could not be written"))
    runs.append(Run("odd-metrics", {"stop_after": 6}, stage=PretrainWithOddMetrics, failing_metrics=5))  # a first evaluation, 3 steps
    runs += [*_stopped("stopped-at-10", 10), *_stopped("stopped-at-end", STEPS)]
    lost = {"failing_export": True, "expected_error": "the model could not be written"}
    runs.append(Run("export-lost", {"resume": True}, copied_from="zero1-dp2", crashed_after=None, **lost))
    runs += _released(inputs, "dp2", fast=True)
    runs.append(Run("moving-on", {"run": "moving", "ds_config": ds_config("zero1"), "resume": True, "stop_after": 13}))
    # tensor parallelism comes last, because DeepSpeed keeps an mpu for as long as the process lives
    runs += [_tp2("zero0", stop_after=10), *_with_resumed(_tp2("zero1")), _tp2("zero2", stop_after=10), _tp2("zero3", stop_after=10)]
    runs.append(Run("moving-end", {"run": "moving", "ds_config": ds_config("zero2"), "resume": True, "tp_size": 2}))
    runs += _released(inputs, "tp2", fast=True)
    return runs


def _slow_two(inputs: Path) -> list[Run]:
    runs = [*_poisoned("zero0"), *_poisoned("zero2"), *_odd(inputs, "zero0"), *_odd(inputs, "zero1"), *_odd(inputs, "zero2")]
    runs.append(Run("long-dp2", {"train_tokens": LONG_STEPS * SEQ_LEN * GLOBAL_BATCH_SIZE}))
    runs += _released(inputs, "dp2", fast=False)
    for name in ("zero0", "zero2", "zero3"):
        run = _tp2(name)
        runs += _with_resumed(Run(f"{name}-tp2-long", run.changes))
    poison = Poison(("loss", "gradient"), SKIPPED, rank=1)
    runs.append(Run("tp2-poisoned", {"tp_size": 2, "save_interval": 2, "stop_after": 6}, poison=poison))
    runs += _released(inputs, "tp2", fast=False)
    return runs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """Folder with a corpus, its tokenizer and a model's config; runs are made in it."""
    folder = tmp_path_factory.mktemp("training")
    make_inputs(folder)
    return folder


@pytest.fixture(scope="session")
def made(inputs) -> Worlds:
    """`made(name)` is the folder of a run."""
    worlds = [(1, _fast_one(inputs)), (2, _fast_two(inputs)), (1, _slow_one(inputs)), (2, _slow_two(inputs))]
    return Worlds(inputs, worlds, make_runs)


@pytest.fixture
def options(inputs, tmp_path):
    """A function that makes the options of a run in a fresh folder."""
    return lambda **changes: arguments(inputs, "run") | {"output_dir": str(tmp_path / "run")} | changes
