"""Scan on a GPU by Triton kernels, which keep what is carried in registers and refuse no state size.  Triton is optional.

Without a GPU the same kernels run, slowly, in Triton's interpreter, where TRITON_INTERPRET=1 is set before the first scan.
"""

import functools
import os
from types import ModuleType

import torch

from megahedge.kernels.problem import Backend, Problem, ScanInputs, ScanOutputs
from megahedge.kernels.triton_check import find_fault
from megahedge.utils.packages import Broken, import_fault


def interpreting() -> bool:
    """Whether Triton runs its kernels in Python, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def supports(problem: Problem) -> str | None:
    """A Triton that does not import counts as missing."""
    if problem.device != "cuda" and not interpreting():
        return "it runs on GPUs only"
    if problem.dtype != torch.float32:
        return "its states are fp32"
    launchers = _load_launchers()
    if isinstance(launchers, str):
        return launchers
    return _fault(problem.structure, problem.step_axis) if problem.device == "cuda" else None


@functools.cache
def _fault(structure: str, step_axis: str | None) -> str | None:
    """Why the kernels are not to be trusted on this GPU, found out once in a process."""
    try:
        fault = find_fault(BACKEND, structure, step_axis, "cuda")
    except Exception as error:  # of the compiler, the driver
        fault = f"its kernels do not run on this GPU ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
    return None if fault is None else Broken(fault)


@functools.cache
def _load_launchers() -> tuple[ModuleType, ModuleType] | str:
    """What runs decays by channel and all others, or why there is nothing: the kernels are compiled at their first call."""
    try:
        from megahedge.kernels import triton_channel, triton_chunks
    except Exception as error:  # whatever a broken wheel raises
        return import_fault("triton", error)
    return triton_channel, triton_chunks


def run(inputs: ScanInputs) -> ScanOutputs:
    """Shapes as in ScanInputs."""
    channel, chunks = _load_launchers()
    return (channel if inputs.problem.decay_per_channel else chunks).run(_interpretable(inputs))


def _interpretable(inputs: ScanInputs) -> ScanInputs:
    """In fp32 on a CPU: the interpreter of Triton 3.7 multiplies matrices of bf16 as if their bits were whole numbers."""
    return inputs.widened() if inputs.V.device.type == "cpu" else inputs


BACKEND = Backend("triton", supports, run, any_dtype=True, normalises=True)
