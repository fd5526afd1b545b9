"""The scan that attention-free mixers run on, over a sequence and one token at a time."""

# b batch, t seq_len, h num_local_heads, n state_size, p head_dim

import math

import torch
from torch import Tensor

from megahedge.kernels.normaliser import DenominatorStats, normalise
from megahedge.kernels.operator import register_scan
from megahedge.kernels.problem import Problem, ScanInputs, ScanState
from megahedge.kernels.registry import choose_backend
from megahedge.utils.precision import full_precision

STRUCTURES = ("none", "head", "state", "channel")
"""By the number of axes of the rate."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EPS = 1e-30
"""Magnitude below which a denominator is replaced: fit for positive features, where only 0 / 0 has to be caught."""


def scan(
    C: Tensor,
    B: Tensor,
    V: Tensor,
    step: Tensor | None = None,
    rate: Tensor | None = None,
    *,
    normalize: bool = True,
    initial_state: ScanState | None = None,
    boundaries: Tensor | None = None,
    backend: str = "auto",
    step_axis: str | None = None,
    eps: float = EPS,
    stats: DenominatorStats | None = None,
) -> tuple[Tensor, ScanState]:
    """Run h_t = exp(-rate * step_t) * h_{t-1} + step_t * (B_t outer V_t),  y_t = C_t h_t / C_t z_t  (z: the same with V = 1).

    Attention to Mamba (arXiv 2604.14191), equations (2), (9), (10).
    C, B [b, t, h, n] features of queries and keys;  V [b, t, h, p];  step >= 0 [b, t, h, 1 | n | p], None for 1;
    rate >= 0 [h], [h, n] or [h, n, p] (h may be 1), None for no decay.
    State and normaliser are fp32 whatever the inputs, also under autocast; fp64 where C, B or V is.
    Without `normalize`, y_t = C_t h_t.
    initial_state: what is remembered of earlier tokens, as an earlier call returned it.
    boundaries [b, t] bool: True where a new document begins; the state is reset before that token.
    All of these are finite, steps and rates not negative, which is not looked at: a NaN or an infinity can reach tokens before it and other
    documents of its sequence, by products with the zeros that keep them apart.
    step_axis: "state" or "channel", the last axis of step; needed only where n == p > 1, since then its size does not tell.
    eps > 0: denominators below it in magnitude are replaced by it with their sign (0 counts as positive) and have no gradient.
    stats: counts the denominators, the replaced and the negative ones.
    Returns y [b, t, h, p] in V.dtype and the last state.
    Raises ValueError if shapes or dtypes do not fit, or if the named backend cannot run this problem, with its reason.
    """
    if torch.compiler.is_compiling():
        return _compilable_scan(
            C,
            B,
            V,
            step,
            rate,
            normalize=normalize,
            initial_state=initial_state,
            boundaries=boundaries,
            backend=backend,
            step_axis=step_axis,
            eps=eps,
            stats=stats,
        )
    if B.shape != C.shape or C.dim() != 4 or V.shape[:-1] != C.shape[:-1] or 0 in (*C.shape, *V.shape):
        raise ValueError(f"C and B are [b, t, h, n] and V [b, t, h, p], none of which may be 0, not {_shapes(C, B, V)}")
    if boundaries is not None and (boundaries.shape != C.shape[:2] or boundaries.dtype != torch.bool):
        raise ValueError(f"boundaries is [b, t] bool, not {list(boundaries.shape)} {boundaries.dtype}")
    with full_precision(C):
        inputs = _prepare(C, B, V, step, rate, normalize, initial_state, boundaries, step_axis, eps)
        chosen = choose_backend(backend, inputs.problem)
        y, denominator, *state = chosen.run(inputs if chosen.any_dtype else inputs.widened())
        if denominator is not None:
            if stats is not None:
                stats.add(denominator, eps)
            if not chosen.normalises:
                y = normalise(y, denominator, eps)
    return y.to(V.dtype), _packed_state(inputs.problem, *state)


_compilable_scan = register_scan(scan)


def scan_step(
    C: Tensor,
    B: Tensor,
    V: Tensor,
    step: Tensor | None = None,
    rate: Tensor | None = None,
    state: ScanState | None = None,
    *,
    normalize: bool = True,
    step_axis: str | None = None,
    eps: float = EPS,
    in_place: bool = False,
) -> tuple[Tensor, ScanState]:
    """Continue a scan by one token: C, B [b, h, n], V [b, h, p], step [b, h, 1 | n | p]; all else as in `scan`.

    in_place: move the given state on in its own memory, which a gradient could not follow; else it is left as it is.
    Returns y [b, h, p] in V.dtype and the new state.
    Raises ValueError if shapes or dtypes do not fit, and for in_place where gradients are recorded.
    """
    if in_place and torch.is_grad_enabled():
        raise ValueError("in_place=True is for decoding: call it under torch.no_grad()")
    if B.shape != C.shape or C.dim() != 3 or V.shape[:-1] != C.shape[:-1] or 0 in (*C.shape, *V.shape):
        raise ValueError(f"C and B are [b, h, n] and V [b, h, p], none of which may be 0, not {_shapes(C, B, V)}")
    if step is not None and (step.dim() != 3 or step.shape[:2] != C.shape[:2]):
        raise ValueError(f"step is [b, h, 1 | n | p] with b, h = {list(C.shape[:2])}, not {_shapes(step)}")
    with full_precision(C):
        with_time = (None if x is None else x.unsqueeze(1) for x in (C, B, V, step))
        inputs = _prepare(*with_time, rate, normalize, state, None, step_axis, eps).widened()
        C, B, V32, step = (x.squeeze(1) for x in (inputs.C, inputs.B, inputs.V, inputs.step))
        keep = None if inputs.rate is None else torch.exp(-inputs.rate * step)
        h, z = inputs.numerator, inputs.denominator
        if in_place and state is not None and state.numerator.dtype != h.dtype:
            raise ValueError(f"in_place=True moves a state on that is {h.dtype}, not {state.numerator.dtype}")
        if not in_place:
            h, z = h.clone(), None if z is None else z.clone()
        y = _advance_and_read(C, h, keep, B, V32, step)
        if z is not None:
            y = normalise(y, _advance_and_read(C, z, keep, B, torch.ones_like(V32[..., : z.shape[-1]]), step), eps)
    return y.to(V.dtype), _packed_state(inputs.problem, h, z)


def _advance_and_read(C: Tensor, state: Tensor, keep: Tensor | None, B: Tensor, V: Tensor, step: Tensor) -> Tensor:
    """state = keep * state + step * (B outer V) in place, with C_t of it, [b, h, p].

    state [b, h, n, p], keep = exp(-rate * step) [b, h, 1 | n, 1 | p] or None (= 1), C, B [b, h, n], V [b, h, p], step like keep.
    """
    if keep is not None:
        state.mul_(keep)
    rows, columns = B.unsqueeze(-1), V.unsqueeze(-2)
    if step.shape[-1] == 1:
        rows = rows * step
    else:
        columns = columns * step
    state.addcmul_(rows, columns)
    return (C.unsqueeze(-2) @ state).squeeze(-2)


def _prepare(C, B, V, step, rate, normalize, initial_state, boundaries, step_axis, eps) -> ScanInputs:
    """Inputs in the shapes that backends read, and all but C, B and V in the dtype of the arithmetic."""
    if not all(x.dtype in FLOATS for x in (C, B, V)):
        raise ValueError(f"C, B and V are floating-point tensors of 16 to 64 bits, not {', '.join(str(x.dtype) for x in (C, B, V))}")
    if not (isinstance(eps, (int, float)) and 0 < eps < math.inf):
        raise ValueError(f"eps is a number above 0, not {eps!r}")
    dtype = torch.float64 if torch.float64 in (C.dtype, B.dtype, V.dtype) else torch.float32
    tensors = [x for x in (C, B, V, step, rate) if x is not None]
    tensors += [] if initial_state is None else [initial_state.numerator]
    state_size, head_dim = C.shape[-1], V.shape[-1]
    problem = Problem(
        structure="none" if rate is None else _structure(rate, C.shape[2], state_size, head_dim),
        step_axis=_step_axis(step, step_axis, C, head_dim),
        normalize=normalize,
        state_size=state_size,
        head_dim=head_dim,
        device=C.device.type,
        dtype=dtype,
        needs_grad=torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
        boundaries=boundaries is not None,
        initial_state=initial_state is not None,
    )
    if rate is not None:
        rate = rate.to(dtype).reshape(*rate.shape, *[1] * (3 - rate.dim()))
    numerator, denominator = _unpacked_state(initial_state, problem, C)
    return ScanInputs(problem, C, B, V, _spread_step(step, problem, C), rate, numerator, denominator, boundaries, eps)


def _structure(rate: Tensor, num_heads: int, state_size: int, head_dim: int) -> str:
    fits = 1 <= rate.dim() <= 3 and rate.shape[0] in (1, num_heads) and rate.shape[1:] == (state_size, head_dim)[: rate.dim() - 1]
    if not fits:
        raise ValueError(
            f"rate is [h], [h, n] or [h, n, p] with h = 1 or {num_heads}, n = {state_size}, p = {head_dim}, not {_shapes(rate)}"
        )
    return STRUCTURES[rate.dim()]


def _step_axis(step: Tensor | None, named: str | None, C: Tensor, head_dim: int) -> str | None:
    """shared, state or channel, by the size of the step's last axis or, where that does not tell, by name."""
    if named not in (None, "state", "channel"):
        raise ValueError(f"step_axis is 'state', 'channel' or None, not {named!r}")
    if step is None:
        return None
    if step.dim() != 4 or step.shape[:3] != C.shape[:3]:
        raise ValueError(f"step is [b, t, h, 1 | n | p] with b, t, h = {list(C.shape[:3])}, not {_shapes(step)}")
    size = step.shape[-1]
    if size == 1:
        return "shared"
    axes = [axis for axis, axis_size in (("state", C.shape[-1]), ("channel", head_dim)) if size == axis_size and named in (None, axis)]
    if not axes:
        raise ValueError(f"the last axis of step has size {size}; n = {C.shape[-1]}, p = {head_dim}, step_axis={named!r}")
    if len(axes) == 2:
        raise ValueError(f"n = p = {size}: say by step_axis='state' or 'channel' what the last axis of step is")
    return axes[0]


def _spread_step(step: Tensor | None, problem: Problem, C: Tensor) -> Tensor:
    """[b, t, h, 1 | n, 1 | p], ones where there is none."""
    if step is None:
        return C.new_ones(1, dtype=problem.dtype).expand(*C.shape[:3], 1, 1)
    return step.to(problem.dtype).unsqueeze(-2 if problem.step_axis == "channel" else -1)


def _unpacked_state(state: ScanState | None, problem: Problem, C: Tensor) -> tuple[Tensor, Tensor | None]:
    """Numerator [b, h, n, p] and denominator [b, h, n, 1 | p] or None; zeros where no state is given."""
    batch, _, num_heads, state_size = C.shape
    shape = (batch, num_heads, state_size, problem.head_dim)
    columns = (problem.head_dim,) if problem.per_channel else ()
    if state is None:
        denominator = C.new_zeros(*shape[:3], *(columns or (1,)), dtype=problem.dtype) if problem.normalize else None
        return C.new_zeros(shape, dtype=problem.dtype), denominator
    if state.numerator.shape != shape:
        raise ValueError(f"the state's numerator is {list(shape)} here, not {_shapes(state.numerator)}")
    if not problem.normalize:
        return state.numerator.to(problem.dtype), None
    if state.denominator is None or state.denominator.shape != shape[:3] + columns:
        found = "None" if state.denominator is None else _shapes(state.denominator)
        raise ValueError(f"the state's denominator is {list(shape[:3] + columns)} here, not {found}")
    denominator = state.denominator.to(problem.dtype)
    return state.numerator.to(problem.dtype), denominator if problem.per_channel else denominator.unsqueeze(-1)


def _packed_state(problem: Problem, numerator: Tensor, denominator: Tensor | None) -> ScanState:
    if denominator is not None and not problem.per_channel:
        denominator = denominator.squeeze(-1)
    return ScanState(numerator, denominator)


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)
