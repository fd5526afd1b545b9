"""The programs that measure on a GPU run; on a CPU, small, by another backend."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.configurations import CONFIGURATIONS

ROOT = Path(__file__).resolve().parents[2]


def run_program(name, *words):
    command = [sys.executable, "-m", f"tests.gpu.{name}", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)


@pytest.mark.slow
def test_measure_compares_and_times():
    sizes = ("--head_dims", "8", "--seq_len", "9", "--models", "160M", "--timed_seq_len", "16", "--batch", "1", "--repeats", "1")
    done = run_program("measure", "--device", "cpu", "--backend", "auto", *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "too large" not in done.stdout
    assert done.stdout.count("| 8 |") == len(CONFIGURATIONS)
    assert "| 160M | none, step 1, bfloat16 | chunked |" in done.stdout
    assert "| 160M | convolution | torch |" in done.stdout and "| 160M | feature map's softmax | torch |" in done.stdout


def test_measure_without_a_gpu_says_so():
    done = run_program("measure")
    assert done.returncode == 2 and done.stderr.startswith("error: no GPU is here")


@pytest.mark.slow
def test_roofline_and_compile_table_are_printed():
    pytest.importorskip("triton", reason="triton is not installed")
    done = run_program("compile_table", "--head_dims", "32", "--capabilities", "90", "--configurations", "none, step 1, bfloat16")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines()[2:]]
    assert len(rows) >= 4 and {row[5].strip() for row in rows} == {"0"}  # the stack
    done = run_program("roofline")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| 1B |") == 4
