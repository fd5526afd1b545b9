"""Run a function in several processes joined by gloo, without ever hanging the test run."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist


class WorldFailedError(AssertionError):
    """A rank raised, died or did not finish; the message carries its traceback."""


def run_distributed(function: Callable, world_size: int, *args, timeout_seconds: float = 180.0) -> list:
    """Call `function(*args)` on every rank of a fresh gloo world and return the ranks' results in order.

    `function` is found by name in the new processes, so it stands at the top level of an importable module; arguments and results
    are pickled.  The first rank that fails ends the world: its traceback is raised and the others, which may be waiting for it in
    a collective, are killed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        world = [
            _start(context, function, args, rank, world_size, Path(folder) / "rendezvous", timeout_seconds) for rank in range(world_size)
        ]
        try:
            return _collect(world, time.monotonic() + timeout_seconds)
        finally:
            for process, receiver in world:
                process.kill()
                process.join()
                receiver.close()


def _start(context, function, args, rank, world_size, rendezvous, timeout_seconds):
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(sender, function, args, rank, world_size, rendezvous, timeout_seconds), daemon=True)
    process.start()
    sender.close()  # ours; the rank holds the only other one, so that its death ends the pipe
    return process, receiver


def _collect(world: list, deadline: float) -> list:
    results = {}
    ranks = {receiver: rank for rank, (_, receiver) in enumerate(world)}
    while ranks:
        ready = wait(list(ranks), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorldFailedError(f"ranks {sorted(ranks.values())} of {len(world)} did not finish in time")
        for receiver in ready:
            rank = ranks.pop(receiver)
            try:
                succeeded, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                world[rank][0].join(timeout=5)
                raise WorldFailedError(f"rank {rank} died with exit code {world[rank][0].exitcode}") from None
            if not succeeded:
                raise WorldFailedError(f"rank {rank} of {len(world)} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(world))]


def _rank_main(sender, function, args, rank, world_size, rendezvous, timeout_seconds):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_seconds)
        )
        outcome = (True, function(*args))
        dist.barrier()  # no rank is killed while another still talks to it
    except BaseException:
        outcome = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(outcome))
    time.sleep(timeout_seconds)  # until killed: connections that close early would make other ranks report that, not the cause
