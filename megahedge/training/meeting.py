"""Whether the ranks of a job find each other and can add numbers up: a roll call, and all-reduces that are timed.

Neither waits for ever: what hangs here would hang a run for the hour that its collectives may take, and nobody would know where.
"""

import dataclasses
import datetime
import json
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megahedge.training.distributed import cannot_meet, describe_job
from megahedge.utils.errors import RunError
from megahedge.utils.launcher import launcher_number
from megahedge.utils.words import ranks_have

ROLL_CALL_SECONDS = 60.0
ALL_REDUCE_SECONDS = 60.0
SMALL_BYTES, LARGE_BYTES = 4, 64 << 20
_REPEATS = {SMALL_BYTES: 20, LARGE_BYTES: 3}
_HERE, _COUNTED, _BEGUN, _ENDED = (f"megahedge/meeting/{word}/" for word in ("here", "counted", "begun", "ended"))
_GRACE_SECONDS = 10.0
"""What a rank waits for rank 0's verdict beyond the time of the roll call."""


@dataclasses.dataclass(frozen=True)
class RollCall:
    """Who has come."""

    facts: dict[int, dict]
    """What each rank has said of itself; only on rank 0."""
    missing: list[int]
    store: dist.Store | None = None
    """Rank 0's, which goes with the last reference: the others may still be asking."""


def roll_call(facts: dict, seconds: float = ROLL_CALL_SECONDS) -> RollCall:
    """Wait until every rank of the job is here, for `seconds` at most, before any group of processes is made.  Collective.

    facts: what this rank has to say of itself, for JSON.
    Raises InputError where the environment describes no job, RunError on ranks that do not reach rank 0.
    """
    describe_job()
    rank, ranks = launcher_number("RANK"), range(launcher_number("WORLD_SIZE"))
    if len(ranks) == 1:
        return RollCall({0: facts}, [])
    deadline = time.monotonic() + seconds
    store = _open_store(rank, seconds)
    try:
        store.set(f"{_HERE}{rank}", json.dumps(facts))
        if rank == 0:
            missing = _wait_for_others(store, ranks, deadline)
            store.set(_COUNTED, json.dumps(missing))
        else:
            store.wait([_COUNTED], datetime.timedelta(seconds=seconds + _GRACE_SECONDS))
            missing = json.loads(store.get(_COUNTED))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise cannot_meet(error) from None
    if rank != 0:
        return RollCall({}, missing, store)
    return RollCall({other: json.loads(store.get(f"{_HERE}{other}")) for other in ranks if other not in missing}, missing, store)


def _open_store(rank: int, seconds: float) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT, where the job's groups will be made as well; torchrun's own where there is one."""
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            launcher_number("MASTER_PORT"),
            is_master=hosts,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise cannot_meet(error) from None


def _wait_for_others(store: dist.Store, ranks: range, deadline: float) -> list[int]:
    """Those that have not come when the time is over."""
    missing = list(ranks)
    while missing:
        missing = [rank for rank in missing if not store.check([f"{_HERE}{rank}"])]
        if not missing or time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    return missing


@dataclasses.dataclass(frozen=True)
class Timing:
    """All-reduces of one size over all ranks."""

    num_bytes: int
    seconds: float
    """Of the fastest."""
    bus_bytes_per_second: float
    """What passes each rank's link, counted as nccl-tests does: 2 (n − 1) / n of the bytes."""


def time_all_reduces(device: torch.device, seconds: float = ALL_REDUCE_SECONDS) -> list[Timing]:
    """Add numbers up over all ranks, few and many of them, and look at the sums.  Collective.

    seconds: what each may take.  Raises RunError for a wrong sum, and naming who is missing for one that does not end; the process
    then has a collective under way, and ends only by os._exit.
    """
    return [_time(size, device, seconds) for size in (SMALL_BYTES, LARGE_BYTES)]


def _time(num_bytes: int, device: torch.device, seconds: float) -> Timing:
    ranks = dist.get_world_size()
    tensor, expected = torch.empty(num_bytes // 4, device=device), ranks * (ranks + 1) / 2
    times = []
    for turn in range(_REPEATS[num_bytes] + 1):  # the first one makes connections
        tensor.fill_(dist.get_rank() + 1)
        times.append(_all_reduce(tensor, f"{num_bytes}/{turn}", seconds))
        low, high = tensor.aminmax()
        if low != expected or high != expected:
            raise RunError(f"an all-reduce of {num_bytes} bytes gives {low.item():g} to {high.item():g} where {expected:g} is right")
    fastest = min(times[1:])
    return Timing(num_bytes, fastest, 2 * (ranks - 1) / ranks * num_bytes / fastest)


def _all_reduce(tensor: torch.Tensor, name: str, seconds: float) -> float:
    """Seconds of one all-reduce, given up after `seconds`.  Ranks leave a mark under its name in the store before and after it."""
    store, rank = _get_default_store(), dist.get_rank()
    store.set(f"{_BEGUN}{name}/{rank}", "")
    if tensor.is_cuda:
        torch.cuda.synchronize()
    start = time.monotonic()
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        if time.monotonic() - start >= seconds:
            raise RunError(f"an all-reduce over {dist.get_world_size()} ranks has not ended within {seconds:g} s: {_who_hangs(name)}")
        time.sleep(0)
    work.wait()  # raises where it has failed
    taken = time.monotonic() - start
    store.set(f"{_ENDED}{name}/{rank}", "")
    return taken


def _who_hangs(name: str) -> str:
    """Who has not begun or not ended the all-reduce of that name."""
    store, ranks = _get_default_store(), range(dist.get_world_size())
    absent, hanging = ([rank for rank in ranks if not store.check([f"{mark}{name}/{rank}"])] for mark in (_BEGUN, _ENDED))
    if absent:
        return f"{ranks_have(absent)} not begun it; look at their output, and whether their machines are up"
    return (
        f"all ranks have begun it, and {ranks_have(hanging)} not ended it: their network does not pass data; NCCL_DEBUG=INFO says by which "
        "interface they try, NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME without GPUs) names another"
    )
