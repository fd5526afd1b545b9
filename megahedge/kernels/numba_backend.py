"""Scan on a CPU with the sweeps of loop.py compiled by numba, for decays that differ between the channels of V.  numba is optional."""

# b batch, t seq_len, h num_local_heads, n state_size, p head_dim

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megahedge.kernels.loop import CHECKPOINT_INTERVAL, weighted_inputs
from megahedge.kernels.problem import Backend, Problem, ScanInputs, ScanOutputs
from megahedge.utils.logging import get_logger
from megahedge.utils.packages import import_fault


def supports(problem: Problem) -> str | None:
    """A numba that does not import counts as missing."""
    if not problem.decay_per_channel:
        return "it is for decays that differ between the channels of V"
    if problem.device != "cpu":
        return "it runs on CPUs only"
    sweeps = load_sweeps()
    return sweeps if isinstance(sweeps, str) else None


@functools.cache
def load_sweeps() -> ModuleType | str:
    """The sweeps, each compiled at its first call, or why there are none."""
    try:
        from megahedge.kernels import numba_sweeps
    except Exception as error:  # whatever a broken wheel raises
        return import_fault("numba", error)
    if not any(Path(numba_sweeps.forward.stats.cache_path).glob("numba_sweeps*.nbi")):
        get_logger("kernels").info("numba compiles the scan at its first use in an environment, for about half a minute")
    return numba_sweeps


def run(inputs: ScanInputs) -> ScanOutputs:
    """Shapes as in ScanInputs; everything that has no recurrence is left to autograd."""
    C, rate = inputs.C, inputs.rate
    B, x, u = weighted_inputs(inputs)
    heads, state_size, head_dim = C.shape[2], C.shape[3], x.shape[3]
    by_state = inputs.problem.step_axis == "state"
    step = inputs.step.squeeze(-1) if by_state else inputs.step.squeeze(-2).expand_as(x).unsqueeze(-1)
    lanes = rate.expand(heads, state_size, head_dim).transpose(1, 2)
    h = inputs.numerator
    # Without normalisation a denominator is carried along and left unread.
    z = torch.zeros_like(h) if inputs.denominator is None else inputs.denominator
    states = (state.transpose(2, 3) for state in (h, z))
    by_head = (y.transpose(1, 2) for y in (C, B, x, u, step))
    numerator, denominator, h, z = _CompiledScan.apply(*by_head, lanes, *states, inputs.boundaries)
    numerator, denominator = numerator.transpose(1, 2), denominator.transpose(1, 2)
    if inputs.denominator is None:
        return numerator, None, h.transpose(2, 3), None
    return numerator, denominator, h.transpose(2, 3), z.transpose(2, 3)


class _CompiledScan(torch.autograd.Function):
    """Shapes as in numba_sweeps.Inputs, h and z [b, h, p, n], boundaries [b, t] or None.

    Returns numerator and denominator [b, h, t, p] and the last h and z.
    """

    @staticmethod
    def forward(ctx, C, B, x, u, step, rate, h, z, boundaries):
        C, B, x, u, step, rate, h, z = (tensor.contiguous() for tensor in (C, B, x, u, step, rate, h, z))
        resets = C.new_zeros(C.shape[0], C.shape[2], dtype=torch.bool) if boundaries is None else boundaries.contiguous()
        ctx.save_for_backward(C, B, x, u, step, rate, resets, h, z)
        numerator, denominator, h, z = torch.empty_like(x), torch.empty_like(x), h.clone(), z.clone()
        with _threads_of_torch() as sweeps:
            inputs = sweeps.Inputs(*_arrays(C, B, x, u, step, rate, resets))
            sweeps.forward(inputs, *_arrays(h, z, numerator, denominator))
        own = (C * B).sum(dim=-1, keepdim=True)  # a token reads itself apart from what it keeps, as in loop.py
        return numerator.addcmul_(own, x), denominator.addcmul_(own, u), h, z

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_numerator, grad_denominator, grad_h, grad_z):
        C, B, x, u, step, rate, resets, h, z = ctx.saved_tensors
        grad_numerator, grad_denominator = grad_numerator.contiguous(), grad_denominator.contiguous()
        adjoint_h, adjoint_z = (grad.clone(memory_format=torch.contiguous_format) for grad in (grad_h, grad_z))
        num_stretches = -(-C.shape[2] // CHECKPOINT_INTERVAL)
        grad_C, grad_B, grad_rate, rated = (torch.zeros_like(tensor) for tensor in (C, B, h, step))
        grad_x, grad_u, grad_step, elapsed = (torch.empty_like(tensor) for tensor in (x, u, step, step))
        ends = step.new_zeros(*step.shape[:2], num_stretches, *step.shape[3:])
        with _threads_of_torch() as sweeps:
            inputs = sweeps.Inputs(*_arrays(C, B, x, u, step, rate, resets))
            slopes = sweeps.Slopes(*_arrays(grad_numerator, grad_denominator, adjoint_h, adjoint_z))
            gradients = sweeps.Gradients(*_arrays(grad_C, grad_B, grad_x, grad_u, grad_rate, rated, ends))
            sweeps.backward(inputs, slopes, *_arrays(h, z), CHECKPOINT_INTERVAL, *_arrays(elapsed), gradients, *_arrays(grad_step))
        own = (grad_numerator * x + grad_denominator * u).sum(dim=-1, keepdim=True)
        products = (C * B).sum(dim=-1, keepdim=True)
        grad_x.addcmul_(products, grad_numerator)
        grad_u.addcmul_(products, grad_denominator)
        return (
            grad_C.addcmul_(own, B),
            grad_B.addcmul_(own, C),
            grad_x,
            grad_u,
            grad_step,
            grad_rate.sum(0),
            adjoint_h,
            adjoint_z,
            None,
        )


@contextlib.contextmanager
def _threads_of_torch() -> Iterator[ModuleType]:
    """The sweeps, run by as many threads as torch has; numba's own start sets the number that torch has, which is put back."""
    sweeps, threads = load_sweeps(), torch.get_num_threads()
    sweeps.numba.set_num_threads(max(1, min(threads, sweeps.numba.config.NUMBA_NUM_THREADS)))
    try:
        yield sweeps
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _arrays(*tensors: Tensor) -> list:
    return [tensor.detach().numpy() for tensor in tensors]


BACKEND = Backend("numba", supports, run)
