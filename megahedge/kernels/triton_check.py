"""Whether the Triton kernels compute on this GPU what torch does: a compiler or a driver that gets them wrong must not cost a run."""

import torch
from torch import Tensor

from megahedge.kernels import chunked, loop
from megahedge.kernels.normaliser import normalise
from megahedge.kernels.problem import Backend, Problem, ScanInputs
from megahedge.utils.precision import full_precision

_BATCH, _SEQ_LEN, _HEADS, _STATE_SIZE, _HEAD_DIM = 2, 70, 2, 32, 16
"""Several chunks, the last cut short; small enough to take no time once the kernels are compiled, which is kept on the disk."""
_LIMIT = 1e-3
"""Relative error by norm: some hundred times what rounding does, and far below what a wrong kernel does."""


def find_fault(triton: Backend, structure: str, step_axis: str | None, device: str) -> str | None:
    """What is wrong with scans of that kind, outputs or gradients; None where nothing is."""
    problem = Problem(structure, step_axis, True, _STATE_SIZE, _HEAD_DIM, device, torch.float32, needs_grad=True)
    other = loop.BACKEND if problem.decay_per_channel else chunked.BACKEND
    inputs = _inputs(problem)
    with full_precision(inputs.C), torch.enable_grad():
        expected, found = (_results(backend, inputs) for backend in (other, triton))
    for name, x in expected.items():
        error = float((found[name] - x).norm() / x.norm())
        if not error <= _LIMIT:
            return f"on this GPU its {name} is off by {error:.1e} of itself from what the backend {other.name} computes ({problem})"
    return None


def _inputs(problem: Problem) -> ScanInputs:
    generator = torch.Generator().manual_seed(0)
    lead, sizes = (_BATCH, _SEQ_LEN, _HEADS), {"shared": (1, 1), "state": (_STATE_SIZE, 1), "channel": (1, _HEAD_DIM)}
    rates = {"head": (_HEADS, 1, 1), "state": (_HEADS, _STATE_SIZE, 1), "channel": (_HEADS, _STATE_SIZE, _HEAD_DIM)}

    def drawn(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).to(problem.device).requires_grad_()

    def zeros(columns: int) -> Tensor:
        return torch.zeros(_BATCH, _HEADS, _STATE_SIZE, columns, device=problem.device)

    step = drawn(*lead, *sizes[problem.step_axis]) if problem.step_axis else torch.ones(1, device=problem.device).expand(*lead, 1, 1)
    rate = None if problem.structure == "none" else drawn(*rates[problem.structure])
    boundaries = (torch.rand(lead[:2], generator=generator) < 0.05).to(problem.device)
    columns = _HEAD_DIM if problem.per_channel else 1
    features = (drawn(*lead, _STATE_SIZE), drawn(*lead, _STATE_SIZE), drawn(*lead, _HEAD_DIM))
    return ScanInputs(problem, *features, step, rate, zeros(_HEAD_DIM), zeros(columns), boundaries, eps=1e-30)


def _results(backend: Backend, inputs: ScanInputs) -> dict[str, Tensor]:
    y, denominator, *_ = backend.run(inputs)
    y = y if backend.normalises else normalise(y, denominator, inputs.eps)
    leaves = {name: x for name in ("C", "B", "V", "step", "rate") if (x := getattr(inputs, name)) is not None and x.requires_grad}
    gradients = torch.autograd.grad(y.square().sum(), list(leaves.values()))
    return {"output": y.detach()} | {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
