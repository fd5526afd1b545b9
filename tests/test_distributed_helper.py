"""The helper that joins test processes reports failures and cannot hang."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import WorldFailedError, run_distributed


def scenario(kind: str):
    rank = dist.get_rank()
    if kind == "sum":
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        return rank, total.item()
    if rank == 1:
        if kind == "raise":
            raise RuntimeError("a wrong turn")
        os._exit(7)
    time.sleep(600)  # what a rank does in a collective whose partner is gone


def test_results_come_in_rank_order():
    assert run_distributed(scenario, 2, "sum") == [(0, 3.0), (1, 3.0)]


@pytest.mark.parametrize(
    ("kind", "message"), [("raise", "rank 1 of 2 failed:\n(?s:.*)a wrong turn"), ("die", "rank 1 died with exit code 7")]
)
def test_a_failing_rank_ends_the_world_with_its_traceback(kind, message):
    with pytest.raises(WorldFailedError, match=message):
        run_distributed(scenario, 2, kind)


def test_a_silent_world_ends_at_the_deadline():
    with pytest.raises(WorldFailedError, match=r"ranks \[0\] of 1 did not finish in time"):
        run_distributed(scenario, 1, "wait", timeout_seconds=3)
