"""Joining a job, and failures of rank 0 that reach every rank instead of leaving the others waiting."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from megahedge.checkpoint.store import CheckpointWriter
from megahedge.training import distributed
from megahedge.training.checkpointing import find_checkpoint
from megahedge.training.distributed import (
    LAUNCHER_VARIABLES,
    SHARED_MEMORY,
    init_distributed,
    num_local_ranks,
    on_first_rank,
    quiet_deepspeed,
)
from megahedge.utils.errors import InputError, RunError
from tests.distributed import run_distributed

FAULTS = {
    "input": InputError("--lr=0 must be positive"),
    "run": RunError("ten bad steps"),
    "disk": OSError(28, "No space left on device"),
    "safetensors": SafetensorError("I/O error: No space left on device"),
    "ours": KeyError("forgotten"),
}


def _call_all(root: Path) -> dict:
    """What every call gave or raised on this rank, and how often its action ran here."""
    runs = 0

    def result():
        nonlocal runs
        runs += 1
        return {"rank": dist.get_rank(), "folder": Path("run")}

    def fail(fault):
        raise fault

    outcome = {"result": on_first_rank(result, "working"), "none": on_first_rank(lambda: None, "working"), "runs": runs}
    calls = {name: lambda fault=fault: on_first_rank(lambda: fail(fault), "writing run.json") for name, fault in FAULTS.items()}
    calls["damaged"] = lambda: find_checkpoint(root / "damaged")
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            outcome[name] = (type(error).__name__, str(error))
    sound, nothing = find_checkpoint(root / "sound"), find_checkpoint(root / "nothing")
    # and the ranks are still in step
    return outcome | {"sound": sound.path.name, "nothing": nothing, "again": on_first_rank(lambda: "in step", "")}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[dict]:
    """What two ranks met; a rank that hangs ends the world after a minute."""
    root = tmp_path_factory.mktemp("roots")
    for name, steps in (("damaged", (1, 2)), ("sound", (1, 2))):
        for step in steps:
            writer = CheckpointWriter(root / name, step)
            writer.add("parameters", "a", torch.ones(3))
            writer.finish({})
    damaged = [*(root / "damaged").glob("step-*"), root / "sound" / "step-00000002"]
    for path in damaged:
        (path / "parameters-00000.safetensors").write_bytes(b"")
    return run_distributed(_call_all, 2, root, timeout_seconds=60)


def test_a_result_of_the_first_rank_reaches_all_ranks_and_is_made_once(outcomes):
    assert [outcome["result"] for outcome in outcomes] == 2 * [{"rank": 0, "folder": Path("run")}]
    assert [outcome["none"] for outcome in outcomes] == [None, None]
    assert [outcome["runs"] for outcome in outcomes] == [1, 0]
    assert [outcome["again"] for outcome in outcomes] == ["in step", "in step"]


@pytest.mark.parametrize(
    ("name", "raised"),
    [
        ("input", ("InputError", "--lr=0 must be positive")),
        ("run", ("RunError", "ten bad steps")),
        ("disk", ("RunError", "writing run.json: [Errno 28] No space left on device")),
        ("safetensors", ("RunError", "writing run.json: I/O error: No space left on device")),
    ],
)
def test_what_fails_on_the_first_rank_is_raised_on_all(name, raised, outcomes):
    assert [outcome[name] for outcome in outcomes] == [raised, raised]


def test_a_fault_of_ours_keeps_its_traceback_on_the_first_rank_and_ends_the_others_too(outcomes):
    assert [outcome["ours"] for outcome in outcomes] == [("KeyError", "'forgotten'"), ("RunError", "writing run.json: 'forgotten'")]


def test_all_ranks_go_on_from_one_checkpoint_or_refuse_together(outcomes):
    assert [outcome["sound"] for outcome in outcomes] == 2 * ["step-00000001"]
    assert [outcome["nothing"] for outcome in outcomes] == [None, None]
    for kind, message in (outcome["damaged"] for outcome in outcomes):
        assert kind == "InputError" and "all 2 checkpoints" in message


@pytest.fixture
def environment(monkeypatch):
    """A function that makes a launcher's environment of exactly these variables."""

    def set_to(**values: str) -> None:
        for name in LAUNCHER_VARIABLES:
            monkeypatch.setenv(name, "")  # so that what the test sets is undone, were it nothing before
            monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_to


def test_an_incomplete_environment_is_the_users_error_and_names_what_is_missing(environment):
    environment(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_PORT="29500")
    with pytest.raises(InputError, match=r"^RANK is set without MASTER_ADDR; .*torchrun"):
        init_distributed(1)
    environment(WORLD_SIZE="4", MASTER_ADDR="localhost")
    with pytest.raises(InputError, match=r"^WORLD_SIZE is set without RANK, LOCAL_RANK, MASTER_PORT;"):
        init_distributed(1)


def test_a_number_that_is_none_is_named_before_what_is_missing(environment):
    for name, value in (("RANK", "x"), ("WORLD_SIZE", ""), ("WORLD_SIZE", "²")):
        environment(**{name: value})
        with pytest.raises(InputError, match=f"^the environment says {name}='{value}', which is no number; unset it"):
            init_distributed(1)


def test_ranks_of_a_node_are_counted_by_what_is_a_number(environment, monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for values, expected in (
        ({"WORLD_SIZE": "x"}, 1),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "²", "LOCAL_SIZE": "4"}, 4),
        ({"WORLD_SIZE": "x", "LOCAL_WORLD_SIZE": "4"}, 1),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "x"}, 8),
    ):
        environment(**values)
        assert num_local_ranks() == expected, values


def test_a_level_of_deepspeeds_log_that_is_none_is_named(monkeypatch):
    monkeypatch.setenv("DEEPSPEED_LOG_LEVEL", "loud")
    with pytest.raises(InputError, match=r"^the environment says DEEPSPEED_LOG_LEVEL='loud', which is no level; use debug, info"):
        quiet_deepspeed()


def test_a_tp_size_that_does_not_divide_the_job_is_refused_before_any_process_waits(environment):
    environment(RANK="0", WORLD_SIZE="4", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1")
    with pytest.raises(InputError, match=r"^--tp_size=3 does not divide the number of processes 4; use 1, 2 or 4$"):
        init_distributed(3)
    assert not dist.is_initialized()


def test_a_process_without_a_launcher_is_a_job_of_one(environment):
    environment()
    with pytest.raises(InputError, match=r"number of processes 1; use 1$"):
        init_distributed(2)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    assert os.environ.keys() >= set(LAUNCHER_VARIABLES)


def _buffers_and_sum() -> tuple[list[str], float]:
    """Names of DeepSpeed's buffers that are left once a rank has joined, and what a reduction by way of them then gives."""
    rank = str(dist.get_rank())  # LOCAL_SIZE, which the deepspeed launcher sets, makes DeepSpeed use the buffers
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank, LOCAL_SIZE="2")
    init_distributed(tp_size=1)
    import deepspeed.comm

    dist.barrier()
    left = [path.name for path in SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*_127.0.0.1_1_*")]
    numbers = torch.full((4,), 1.0 + dist.get_rank())
    deepspeed.comm.inference_all_reduce(numbers)
    return left, float(numbers[0])


def test_a_rank_that_is_killed_leaves_no_shared_memory():
    """The buffers have no names once all ranks have opened them, and work as before."""
    assert run_distributed(_buffers_and_sum, 2) == [([], 3.0)] * 2


def _lost_in_turn() -> list:
    """What the ranks say has gone: nobody, rank 1 by a process that has ended, by one whose parent has not looked, on another machine,
    by one that ends while they look."""
    store = dist.distributed_c10d._get_default_store()
    ended, unburied = (subprocess.Popen(["true"]) for _ in range(2))
    ended.wait()
    while Path(f"/proc/{unburied.pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    found = []
    for place in (
        None,
        f"{distributed._machine()} {ended.pid}",
        f"{distributed._machine()} {unburied.pid}",
        f"elsewhere/pid:[1] {ended.pid}",
        "ending",
    ):
        distributed._tell_where_i_am()
        dist.barrier()
        if dist.get_rank() == 0:
            for key in (f"{distributed._GONE}1", *(f"{distributed._ASKED}{rank}" for rank in range(2))):
                store.delete_key(key)
            if place == "ending":
                ending = subprocess.Popen(["sleep", "1"])
                place = f"{distributed._machine()} {ending.pid}"
            if place is not None:
                store.set(f"{distributed._PLACE}1", place)
        dist.barrier()
        found.append(distributed._lost_ranks())
        dist.barrier()
    unburied.wait()
    return found


def test_ranks_whose_process_has_gone_are_named_and_no_others():
    assert run_distributed(_lost_in_turn, 2) == 2 * [[[], [1], [1], [], [1]]]


def test_what_a_collective_says_of_a_lost_rank_becomes_one_line(monkeypatch):
    for lost, said in (
        ([5], "rank 5 of the job has gone"),
        ([2, 5], "ranks 2, 5 of the job have"),
        ([], "another rank"),
        (None, "rank 0 of the job"),
    ):
        monkeypatch.setattr(distributed, "_lost_ranks", lambda lost=lost: lost)
        with pytest.raises(RunError, match=f"^{said}"), distributed.tell_of_lost_ranks():
            raise RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:15123")
    with pytest.raises(RuntimeError, match=r"^out of memory$"), distributed.tell_of_lost_ranks():
        raise RuntimeError("out of memory")
