"""Scan on a GPU by Triton kernels, which keep what is carried in registers and refuse no state size.  Triton is optional.

Without a GPU the same kernels run, slowly, in Triton's interpreter, where TRITON_INTERPRET=1 is set before the first scan.
"""

import functools

import torch

from megahedge.kernels import triton_loading
from megahedge.kernels.problem import Backend, Problem, ScanInputs, ScanOutputs
from megahedge.kernels.triton_check import find_fault

_BY_CHANNEL, _BY_CHUNKS = "triton_channel", "triton_chunks"
"""Modules that launch kernels for decays by channel, and for all others."""


def supports(problem: Problem) -> str | None:
    """A Triton that does not import counts as missing."""
    reason = triton_loading.refusal(problem.device, _BY_CHANNEL, _BY_CHUNKS)
    if reason is not None:
        return reason
    if problem.dtype != torch.float32:
        return "its states are fp32"
    return _fault(problem.structure, problem.step_axis) if problem.device == "cuda" else None


@functools.cache
def _fault(structure: str, step_axis: str | None) -> str | None:
    """Why the kernels are not to be trusted on this GPU, found out once in a process."""
    return triton_loading.fault_of(lambda: find_fault(BACKEND, structure, step_axis, "cuda"))


def run(inputs: ScanInputs) -> ScanOutputs:
    """Shapes as in ScanInputs."""
    launcher = triton_loading.load(_BY_CHANNEL if inputs.problem.decay_per_channel else _BY_CHUNKS)
    return launcher.run(_interpretable(inputs))


def _interpretable(inputs: ScanInputs) -> ScanInputs:
    """In fp32 on a CPU: the interpreter of Triton 3.7 multiplies matrices of bf16 as if their bits were whole numbers."""
    return inputs.widened() if inputs.V.device.type == "cpu" else inputs


BACKEND = Backend("triton", supports, run, any_dtype=True, normalises=True)
