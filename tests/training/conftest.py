"""One folder of inputs for the session, and all runs of one world size made in one go."""

from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.training.runs import Poison, Run, arguments, ds_config, make_inputs, make_runs

ZERO = ("zero0", "zero1", "zero2", "zero3")
OFFLOAD = ("zero2_offload", "zero3_offload")
SKIPPED = (3, 5)
"""Steps at which poisoned runs meet a NaN."""


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """Folder with a corpus, its tokenizer and a model's config; runs are made in it."""
    folder = tmp_path_factory.mktemp("training")
    make_inputs(folder)
    return folder


def _one_process() -> list[Run]:
    runs = []
    for name in ZERO:
        runs.append(Run(name, {"ds_config": ds_config(name)}))
        halves = {"ds_config": ds_config(name), "run": f"{name}-halves"}
        runs += [Run(f"{name}-half", halves | {"stop_after": 10}), Run(f"{name}-halves", halves | {"resume": True})]
        bf16 = {"ds_config": ds_config(name), "dtype": "bf16", "save_interval": 1}
        runs.append(Run(f"{name}-bf16", bf16, poison=Poison(("loss",), (1,), rank=0)))
        runs.append(Run(f"{name}-bf16-resumed", bf16 | {"resume": True}, copied_from=f"{name}-bf16"))
    runs += [Run(name, {"ds_config": ds_config(name), "stop_after": 10}) for name in OFFLOAD]
    runs.append(Run("recomputing", {"stop_after": 10, "activation_checkpointing": True}))
    runs.append(Run("moving-start", {"run": "moving", "ds_config": ds_config("zero3"), "stop_after": 6}))
    return runs


def _two_processes(inputs: Path) -> list[Run]:
    runs = []
    for name in ZERO:
        config = {"ds_config": ds_config(name)}
        runs.append(Run(f"{name}-dp2", config | {"stop_after": 10}))
        runs.append(Run(f"{name}-poisoned", config | {"save_interval": 1}, poison=Poison(("loss", "gradient"), SKIPPED, rank=1)))
        runs.append(Run(f"{name}-poisoned-resumed", config | {"save_interval": 1, "resume": True}, copied_from=f"{name}-poisoned"))
        odd = config | {"save_interval": 1, "dtype": "bf16", "model_config": str(inputs / "odd.json")}
        runs.append(Run(f"{name}-odd", odd, poison=Poison(("gradient",), (1,), rank=1)))
        runs.append(Run(f"{name}-odd-resumed", odd | {"resume": True}, copied_from=f"{name}-odd"))
    runs.append(Run("all-bad", {"ds_config": ds_config("zero2")}, poison=Poison(("loss",), tuple(range(4, 20)), rank=1)))
    runs.append(Run("disk-full", {"save_interval": 2, "stop_after": 6}, failing_save=4))  # two files a save: the second save's second
    runs.append(Run("moving-on", {"run": "moving", "ds_config": ds_config("zero1"), "resume": True, "stop_after": 13}))
    # those with tensor parallelism come last, because DeepSpeed keeps an mpu for as long as the process lives
    for name in ZERO:
        config = {"ds_config": ds_config(name), "tp_size": 2}
        runs.append(Run(f"{name}-tp2", config))
        runs.append(Run(f"{name}-tp2-resumed", config | {"resume": True}, copied_from=f"{name}-tp2"))
    poison = Poison(("loss", "gradient"), SKIPPED, rank=1)
    runs.append(Run("tp2-poisoned", {"tp_size": 2, "save_interval": 1, "stop_after": 6}, poison=poison))
    runs.append(Run("moving-end", {"run": "moving", "ds_config": ds_config("zero2"), "resume": True, "tp_size": 2}))
    return runs


@pytest.fixture(scope="session")
def one_process(inputs) -> dict:
    """All runs of a single process, made; the RunErrors among them by run."""
    (errors,) = run_distributed(make_runs, 1, inputs, _one_process(), timeout_seconds=400)
    return errors


@pytest.fixture(scope="session")
def two_processes(inputs, one_process) -> dict:
    """All runs of two processes, made after those of one, whose checkpoint some go on from; the RunErrors of rank 0 by run."""
    errors, on_rank_1 = run_distributed(make_runs, 2, inputs, _two_processes(inputs), timeout_seconds=500)
    assert errors == on_rank_1
    return errors


@pytest.fixture
def options(inputs, tmp_path):
    """A function that makes the options of a run in a fresh folder."""
    return lambda **changes: arguments(inputs, "run") | {"output_dir": str(tmp_path / "run")} | changes
