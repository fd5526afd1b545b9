"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled for GPUs that are not there."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from megahedge.kernels import BACKENDS, CONV_BACKENDS, features, signed_softmax, triton_backend, triton_conv_backend
from megahedge.kernels.conv_problem import ConvProblem
from megahedge.kernels.conv_registry import choose_conv_backend
from megahedge.kernels.problem import Problem
from megahedge.kernels.registry import choose_backend
from megahedge.utils.logging import get_logger
from megahedge.utils.packages import Broken
from tests.gpu.configurations import CONFIGURATIONS
from tests.kernels.interpreted import GROUPS

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ((80, 80), (256, 90))
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


CONV = ConvProblem(num_taps=4, num_channels=6, device="cuda", dtype=torch.float32, boundaries=True, initial=True)


def test_without_a_gpu_it_says_so():
    problem = Problem("none", None, True, 16, 8, "cpu", torch.float32, needs_grad=False)
    assert BACKENDS["triton"].supports(problem) == "it runs on GPUs only"
    assert CONV_BACKENDS["triton"].supports(dataclasses.replace(CONV, device="cpu")) == "it runs on GPUs only"


FAULTS = pytest.mark.parametrize("found", ["a fault", RuntimeError("no driver")], ids=("wrong", "does not run"))


def finding(found, seen):
    """A check of kernels that notes its arguments in `seen`, and finds that or raises it."""

    def find_fault(*arguments):
        seen.append(arguments[1:])
        if isinstance(found, Exception):
            raise found
        return found

    return find_fault


@FAULTS
def test_kernels_that_a_gpu_gets_wrong_are_left_out(found, monkeypatch):
    """Told once; the next backend runs."""
    seen = []
    monkeypatch.setattr(triton_backend, "find_fault", finding(found, seen))
    triton_backend._fault.cache_clear()
    problem = Problem("none", None, True, 16, 8, "cuda", torch.float32, needs_grad=False)
    assert choose_backend("auto", problem).name == choose_backend("auto", problem).name == "chunked"
    assert seen == [("none", None, "cuda")]
    reason = BACKENDS["triton"].supports(problem)
    assert isinstance(reason, Broken) and ("a fault" in reason or "RuntimeError: no driver" in reason)
    triton_backend._fault.cache_clear()


@FAULTS
def test_so_are_those_of_the_convolution(found, monkeypatch):
    seen = []
    monkeypatch.setattr(triton_conv_backend, "find_fault", finding(found, seen))
    triton_conv_backend._fault.cache_clear()
    assert choose_conv_backend("auto", CONV).name == choose_conv_backend("auto", CONV).name == "torch"
    assert seen == [("cuda",)] and isinstance(CONV_BACKENDS["triton"].supports(CONV), Broken)
    triton_conv_backend._fault.cache_clear()


@FAULTS
def test_so_are_those_of_the_feature_maps(found, monkeypatch, caplog):
    seen = []
    monkeypatch.setattr(features, "find_fault", finding(found, seen))
    monkeypatch.setattr(get_logger("megahedge"), "propagate", True)
    features._fault.cache_clear()
    assert not features._kernels_run("cuda", 64) and not features._kernels_run("cuda", 64)
    assert len(seen) == 1 and "Triton's kernels of the feature maps are left out: " in caplog.text
    features._fault.cache_clear()


def test_the_convolution_takes_what_causal_conv1d_refuses():
    """Odd channels, documents that go on, many taps; but no fp64 and no filters beyond the kernels' code."""
    refusals = {**dict.fromkeys((1, 5, 8)), 9: "it takes at most 8 taps"}
    triton_conv_backend._fault.cache_clear()
    with mock.patch.object(triton_conv_backend, "find_fault", return_value=None):
        for taps, reason in refusals.items():
            assert CONV_BACKENDS["triton"].supports(dataclasses.replace(CONV, num_taps=taps)) == reason
        assert "fp32, fp16 and bf16" in CONV_BACKENDS["triton"].supports(dataclasses.replace(CONV, dtype=torch.float64))
    triton_conv_backend._fault.cache_clear()


def test_features_are_rounded_only_by_kernels():
    """On a CPU they are fp32, whatever they might be stored in, and in fp64 where what they are of is."""
    x = torch.randn(3, 5)
    assert torch.equal(signed_softmax(x, stored=torch.bfloat16), torch.cat((x, -x), -1).softmax(-1))
    assert signed_softmax(x.double(), stored=torch.bfloat16).dtype == torch.float64
    with pytest.raises(ValueError, match="not one number"):
        signed_softmax(x.sum())


def test_a_gpu_gets_it_before_all_others():
    assert next(iter(BACKENDS)) == "triton"
    assert [*CONV_BACKENDS] == ["causal_conv1d", "triton", "torch"]
