"""The scan as one operator of torch, so that a compiled model has it in its graph as a whole.

torch.compile cannot look into a scan, which launches kernels of its own and, on a CPU, decides by values how to go on.  What it needs to
know of one is the shapes of its results and how to get its gradients.  The backward runs the scan once more, since what one backend keeps
for its backward another does not; a model that is not compiled does not come here.
"""

# b batch, t seq_len, h num_local_heads, n state_size, p head_dim

import contextlib
import re
from collections.abc import Callable

import torch
from torch import Tensor

from megahedge.kernels.normaliser import DenominatorStats
from megahedge.kernels.problem import ScanState

_NAMESPACE = re.sub(r"\W", "_", __name__)
"""Of this copy of the file, as exported folders have copies of their own."""
_run: Callable[..., tuple[Tensor, ScanState]]


def register_scan(scan: Callable[..., tuple[Tensor, ScanState]]) -> Callable[..., tuple[Tensor, ScanState]]:
    """Say which function the operator runs; returns one that takes the same arguments and can be compiled."""
    global _run
    _run = scan
    return _call


def _call(C, B, V, step, rate, *, normalize, initial_state, boundaries, backend, step_axis, eps, stats) -> tuple[Tensor, ScanState]:
    state = (None, None) if initial_state is None else (initial_state.numerator, initial_state.denominator)
    y, numerator, denominator, counts = _scan_operator(
        C, B, V, step, rate, *state, boundaries, normalize, backend, step_axis, eps, stats is not None
    )
    if stats is not None:
        total, clamped, negative = counts.unbind()
        stats.total, stats.clamped, stats.negative = stats.total + total, stats.clamped + clamped, stats.negative + negative
    return y, ScanState(numerator, denominator if normalize else None)


@torch.library.custom_op(f"{_NAMESPACE}::scan", mutates_args=())
def _scan_operator(
    C: Tensor,
    B: Tensor,
    V: Tensor,
    step: Tensor | None,
    rate: Tensor | None,
    numerator: Tensor | None,
    denominator: Tensor | None,
    boundaries: Tensor | None,
    normalize: bool,
    backend: str,
    step_axis: str | None,
    eps: float,
    counted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, the last state's numerator and denominator (without normalisation an empty tensor), and the counts of a DenominatorStats."""
    stats = DenominatorStats() if counted else None
    initial = None if numerator is None else ScanState(numerator, denominator)
    y, state = _run(
        C,
        B,
        V,
        step,
        rate,
        normalize=normalize,
        initial_state=initial,
        boundaries=boundaries,
        backend=backend,
        step_axis=step_axis,
        eps=eps,
        stats=stats,
    )
    counts = [0, 0, 0] if stats is None else [int(stats.total), int(stats.clamped), int(stats.negative)]
    last = C.new_empty(0) if state.denominator is None else state.denominator.contiguous()
    return y.contiguous(), state.numerator.contiguous(), last, torch.tensor(counts, device=C.device)


@_scan_operator.register_fake
def _shapes_of_results(C, B, V, step, rate, numerator, denominator, boundaries, normalize, backend, step_axis, eps, counted):
    batch, _, heads, state_size = C.shape
    head_dim = V.shape[-1]
    dtype = torch.float64 if torch.float64 in (C.dtype, B.dtype, V.dtype) else torch.float32
    by_channel = (rate is not None and rate.dim() == 3) or _steps_by_channel(step, step_axis, state_size, head_dim)
    columns = (head_dim,) if by_channel else ()
    last = C.new_empty(batch, heads, state_size, *columns, dtype=dtype) if normalize else C.new_empty(0)
    state = C.new_empty(batch, heads, state_size, head_dim, dtype=dtype)
    return V.new_empty(V.shape), state, last, C.new_empty(3, dtype=torch.int64)


def _steps_by_channel(step: Tensor | None, step_axis: str | None, state_size: int, head_dim: int) -> bool:
    if step is None or step.shape[-1] == 1:
        return False
    return step_axis == "channel" or (step_axis is None and step.shape[-1] == head_dim != state_size)


@torch.library.custom_op(f"{_NAMESPACE}::scan_backward", mutates_args=())
def _backward_operator(
    C: Tensor,
    B: Tensor,
    V: Tensor,
    step: Tensor | None,
    rate: Tensor | None,
    numerator: Tensor | None,
    denominator: Tensor | None,
    boundaries: Tensor | None,
    grad_y: Tensor,
    grad_numerator: Tensor,
    grad_denominator: Tensor,
    normalize: bool,
    backend: str,
    step_axis: str | None,
    eps: float,
) -> list[Tensor]:
    """Gradients of those of C, B, V, step, rate, numerator and denominator that are given."""
    given = [x.detach().requires_grad_() for x in (C, B, V, step, rate, numerator, denominator) if x is not None]
    left = iter(given)
    leaves = [None if x is None else next(left) for x in (C, B, V, step, rate, numerator, denominator)]
    initial = None if leaves[5] is None else ScanState(leaves[5], leaves[6])
    with torch.enable_grad(), _recorded():
        y, state = _run(
            *leaves[:5], normalize=normalize, initial_state=initial, boundaries=boundaries, backend=backend, step_axis=step_axis, eps=eps
        )
        outputs, slopes = [y, state.numerator], [grad_y, grad_numerator]
        if normalize:
            outputs, slopes = [*outputs, state.denominator], [*slopes, grad_denominator]
        gradients = torch.autograd.grad(outputs, given, slopes, allow_unused=True)
    return [torch.zeros_like(x) if gradient is None else gradient.contiguous() for x, gradient in zip(given, gradients, strict=True)]


def _recorded() -> contextlib.AbstractContextManager:
    """Within `with`, autograd records what is done, which torch has switched off for the inside of an operator."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)


@_backward_operator.register_fake
def _shapes_of_gradients(C, B, V, step, rate, numerator, denominator, boundaries, *others):
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (C, B, V, step, rate, numerator, denominator) if x is not None
    ]


def _keep(ctx, inputs, output):
    *tensors, ctx.normalize, ctx.backend, ctx.step_axis, ctx.eps, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(True)


def _backward(ctx, grad_y, grad_numerator, grad_denominator, _):
    *inputs, boundaries = ctx.saved_tensors
    given = iter(
        _backward_operator(
            *inputs, boundaries, grad_y, grad_numerator, grad_denominator, ctx.normalize, ctx.backend, ctx.step_axis, ctx.eps
        )
    )
    return *(None if x is None else next(given) for x in inputs), *[None] * 6


_scan_operator.register_autograd(_backward, setup_context=_keep)
