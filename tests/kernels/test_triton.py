"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled for GPUs that are not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megahedge.kernels import BACKENDS, triton_backend
from megahedge.kernels.problem import Problem
from megahedge.kernels.registry import choose_backend
from megahedge.utils.packages import Broken
from tests.gpu.configurations import CONFIGURATIONS
from tests.kernels.interpreted import GROUPS

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ((64, 90), (80, 90), (256, 80), (256, 90))
"""head_dim and compute capability.  `python -m tests.gpu.compile_table` compiles for all, sm_100 as well, which takes half an hour."""


def run_module(*words, **environment):
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_kernels_compute_what_the_oracle_says(name):
    """Outputs, last states and all gradients."""
    result = run_module("tests.kernels.interpreted", name, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    assert result.stdout.count("ok ") == len(GROUPS[name])


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "capability"), ARCHITECTURES)
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_kernels_compile_without_a_spill(configuration, head_dim, capability, tmp_path, monkeypatch):
    """For GPUs that are not there: zero stack, registers and shared memory within what they have."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from tests.gpu.compile_table import launches_of
    from tests.gpu.compiled import MAX_REGISTERS, SHARED_LIMIT, compiled

    launches = launches_of(configuration, head_dim, capability)
    assert len(launches) >= 3
    for launch in launches:
        needs = compiled(launch, capability)
        assert needs.stack == 0 and needs.registers <= MAX_REGISTERS, (launch.name, needs)
        assert needs.shared <= SHARED_LIMIT[capability], (launch.name, needs)


def test_a_spill_is_seen(tmp_path, monkeypatch):
    """Tiles of twice as many states as fit into registers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from megahedge.kernels import triton_channel
    from megahedge.kernels.tiles import ChannelTile
    from tests.gpu.compile_table import launches_of
    from tests.gpu.compiled import compiled

    monkeypatch.setattr(triton_channel, "channel_tile", lambda *sizes: ChannelTile(64, 32, 1, 1))
    *_, backwards = launches_of(CONFIGURATIONS[0], 64, 90)
    assert compiled(backwards, 90).stack > 0


def test_without_a_gpu_it_says_so():
    problem = Problem("none", None, True, 16, 8, "cpu", torch.float32, needs_grad=False)
    assert BACKENDS["triton"].supports(problem) == "it runs on GPUs only"


@pytest.mark.parametrize("found", ["a fault", RuntimeError("no driver")], ids=("wrong", "does not run"))
def test_kernels_that_a_gpu_gets_wrong_are_left_out(found, monkeypatch):
    """Told once; the next backend runs."""
    seen = []

    def find_fault(backend, structure, step_axis, device):
        seen.append((structure, step_axis, device))
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(triton_backend, "find_fault", find_fault)
    triton_backend._fault.cache_clear()
    problem = Problem("none", None, True, 16, 8, "cuda", torch.float32, needs_grad=False)
    assert choose_backend("auto", problem).name == choose_backend("auto", problem).name == "chunked"
    assert seen == [("none", None, "cuda")]
    reason = BACKENDS["triton"].supports(problem)
    assert isinstance(reason, Broken) and ("a fault" in reason or "RuntimeError: no driver" in reason)
    triton_backend._fault.cache_clear()


def test_a_gpu_gets_it_before_all_others():
    assert next(iter(BACKENDS)) == "triton"
