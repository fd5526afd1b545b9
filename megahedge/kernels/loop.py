"""Scan token by token with an exact backward that stores no states, for decays that differ between the channels of V.

Numerator and denominator are one state S with a leading axis g (2 with normalisation, 1 without), since they decay alike:
    S_t = a_t S_{t-1} + B_t outer X_t,   out_t = C_t S_t,   a_t = exp(-rate * step_t),   X = (step V, step) or, by state, (V, 1).

Backward in two sweeps.  With dS_t = C_t outer dout_t + a_{t+1} dS_{t+1} the adjoint state, the gradient of log a_t is
q_t = sum_g dS_t (a_t S_{t-1}).  With S_t = a_t S_{t-1} + B_t X_t put into q_{t+1} = sum_g (a_{t+1} dS_{t+1}) S_t,
    q_t - q_{t+1} = sum_g (C_t dout_t (a_t S_{t-1})  -  (a_{t+1} dS_{t+1}) B_t X_t).
The first term needs only states, the second only adjoint states: a sweep forwards recomputes the one, a sweep backwards the other, and
their running sum gives q without both ever being stored.  The sum is restarted every CHECKPOINT_INTERVAL tokens from what is left of a
state, sum_g (a_{t+1} dS_{t+1}) (a_t S_{t-1}): over a long sequence its cancellation would cost fast-decaying states their digits.  For
their sake, too, what a token gives to itself, C_t dout_t B_t X_t, is in neither term: it is added to the outputs and gradients apart.
"""

# b batch, t seq_len, h num_local_heads, n state_size, p head_dim, g 2 (numerator, denominator) or 1

import dataclasses

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megahedge.kernels.problem import Backend, Problem, ScanInputs, ScanOutputs
from megahedge.utils.precision import full_precision

CHECKPOINT_INTERVAL = 32
"""Tokens of a stretch.  At 64 the gradient of rates up to 30 was off by 1.1e-5 over a thousand tokens, more than the 1e-5 that is
promised; half as many take twice the memory."""


def run(inputs: ScanInputs) -> ScanOutputs:
    """Shapes as in ScanInputs; everything that has no recurrence is left to autograd."""
    B, x, u = weighted_inputs(inputs)
    X = torch.stack([_time_first(y) for y in ([x, u] if inputs.problem.normalize else [x])], dim=1)
    states = [inputs.numerator] if inputs.denominator is None else [inputs.numerator, inputs.denominator]
    outputs, state = _ChannelScan.apply(
        *(_time_first(x) for x in (inputs.C, B)), X, _time_first(inputs.step), inputs.rate, torch.stack(states), inputs.boundaries
    )
    outputs = outputs.movedim(0, 2)  # [g, b, t, h, p]
    if inputs.denominator is None:
        return outputs[0], None, state[0], None
    return outputs[0], outputs[1], state[0].clone(), state[1].clone()  # each in memory of its own, which decoding goes on in


def weighted_inputs(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """B [b, t, h, n], and what numerator and denominator take in, [b, t, h, p]; the step is in what has its axis."""
    if inputs.problem.step_axis == "channel":
        unit = inputs.step.squeeze(-2)
        return inputs.B, inputs.V * unit, unit.expand_as(inputs.V)
    return inputs.B * inputs.step.squeeze(-1), inputs.V, torch.ones_like(inputs.V)


def _time_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous()


class _ChannelScan(torch.autograd.Function):
    """C, B [t, b, h, n], X [t, g, b, h, p], step [t, b, h, 1 | n, 1 | p], rate [1 | h, 1 | n, 1 | p], state [g, b, h, n, p].

    Returns out like X and the last state.
    """

    @staticmethod
    def forward(ctx, C, B, X, step, rate, state, boundaries):
        ctx.save_for_backward(C, B, X, step, rate, state)
        ctx.resets = _resets(boundaries, C.shape[0])
        outputs = X * _products(C, B)  # each token's own part: the first of a document gives V even where C_t B_t nearly cancels
        state = state.clone()
        decay = _decay_scratch(rate, step)
        for t, reset in enumerate(ctx.resets):
            _decay_(state, decay, rate, step[t], reset)
            outputs[t] += _contract(C[t], state)
            _add_outer_(state, B[t], X[t])
        return outputs, state

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_outputs, grad_state):
        saved = ctx.saved_tensors  # read once: activation checkpointing gives each tensor out a single time
        with full_precision(grad_outputs):
            forwards = _sweep_forwards(saved, ctx.resets, grad_outputs)
            return (*_sweep_backwards(saved, ctx.resets, grad_outputs, grad_state, forwards), None)


@dataclasses.dataclass(frozen=True)
class _Forwards:
    """What the sweep forwards leaves to the sweep backwards."""

    C: Tensor
    """Gradient of C but for each token's own part."""
    rate: Tensor
    """Gradient of the rate [b, h, n, p], the part that follows from the states."""
    rated: Tensor
    """Like step: sum of rate * C_t dout_t (a_t S_{t-1}) over the axes that step lacks."""
    elapsed: list[Tensor]
    """For each token the sum of steps since its stretch or its document began."""
    checkpoints: list[Tensor]
    """What is left of the state at the last token of each stretch, before that token adds to it."""


def _sweep_forwards(saved: tuple[Tensor, ...], resets: list[Tensor | None], grad_outputs: Tensor) -> _Forwards:
    C, B, X, step, rate, state = saved
    state = state.clone()
    decay, product = _decay_scratch(rate, step), torch.empty_like(state[0])
    grad_C, grad_rate, rated, elapsed, checkpoints = torch.empty_like(C), torch.zeros_like(state[0]), torch.empty_like(step), [], []
    for t, reset in enumerate(resets):
        _decay_(state, decay, rate, step[t], reset)
        since = step[t] if t % CHECKPOINT_INTERVAL == 0 else elapsed[-1] + step[t]
        elapsed.append(_cleared(since, reset))
        _sum_products(state, grad_outputs[t].unsqueeze(-2), out=product)
        grad_C[t] = product.sum(dim=-1)
        product.mul_(C[t].unsqueeze(-1))
        grad_rate.addcmul_(product, elapsed[t], value=-1)
        rated[t] = product.mul_(rate).sum_to_size(step[t].shape)
        if _ends_stretch(t, len(resets)):
            checkpoints.append(state.clone())
        _add_outer_(state, B[t], X[t])
    return _Forwards(grad_C, grad_rate, rated, elapsed, checkpoints)


def _sweep_backwards(
    saved: tuple[Tensor, ...], resets: list[Tensor | None], grad_outputs: Tensor, grad_state: Tensor, forwards: _Forwards
) -> tuple[Tensor, ...]:
    """Gradients of C, B, X, step, rate and state."""
    C, B, X, step, rate, _ = saved
    adjoint = grad_state.clone()
    decay, product, running = _decay_scratch(rate, step), torch.empty_like(adjoint[0]), 0.0
    grad_B, grad_X, grad_step, grad_rate = torch.empty_like(B), torch.empty_like(X), torch.empty_like(step), forwards.rate
    for t, reset in reversed(list(enumerate(resets))):
        grad_X[t] = _contract(B[t], adjoint)
        _sum_products(adjoint, X[t].unsqueeze(-2), out=product)
        grad_B[t] = product.sum(dim=-1)
        if _ends_stretch(t, len(resets)):
            _sum_products(adjoint, forwards.checkpoints.pop(), out=product)  # q_{t+1} less the token's own part, exactly
            product.neg_()
            running = 0.0
        else:
            product.mul_(B[t].unsqueeze(-1))
        grad_rate.addcmul_(product, forwards.elapsed[t])
        running = running + forwards.rated[t] - product.mul_(rate).sum_to_size(step[t].shape)
        running = _cleared(running, reset)  # the first token of a document decays nothing: its q is 0
        grad_step[t] = -running
        _add_outer_(adjoint, C[t], grad_outputs[t])
        _decay_(adjoint, decay, rate, step[t], reset)
    own = (grad_outputs * X).sum(dim=(1, 4)).unsqueeze(-1)  # [t, b, h, 1]
    grad_C, grad_B, grad_X = forwards.C + own * B, grad_B + own * C, grad_X + _products(C, B) * grad_outputs
    return grad_C, grad_B, grad_X, grad_step, grad_rate.sum_to_size(rate.shape), adjoint


def _ends_stretch(t: int, seq_len: int) -> bool:
    return (t + 1) % CHECKPOINT_INTERVAL == 0 or t + 1 == seq_len


def _resets(boundaries: Tensor | None, seq_len: int) -> list[Tensor | None]:
    """For each token the sequences whose state is reset before it, [b, 1, 1, 1] bool, or None where there are none."""
    if boundaries is None:
        return [None] * seq_len
    masks = boundaries[:, :, None, None, None].unbind(dim=1)
    return [mask if some else None for mask, some in zip(masks, boundaries.any(dim=0).tolist(), strict=True)]


def _cleared(x: Tensor, reset: Tensor | None) -> Tensor:
    return x if reset is None else x.masked_fill(reset, 0.0)


def _decay_scratch(rate: Tensor, step: Tensor) -> Tensor:
    """Room for the decay of one token, [b, h, 1 | n, 1 | p]."""
    return rate.new_empty(torch.broadcast_shapes(rate.shape, step.shape[1:]))


def _decay_(state: Tensor, decay: Tensor, rate: Tensor, step: Tensor, reset: Tensor | None) -> None:
    """state *= exp(-rate * step), or = 0 where reset; `decay` is scratch."""
    torch.mul(rate, step, out=decay).neg_().exp_()
    state.mul_(decay)
    if reset is not None:
        state.masked_fill_(reset, 0.0)


def _add_outer_(state: Tensor, rows: Tensor, columns: Tensor) -> None:
    """state [g, b, h, n, p] += rows [b, h, n] outer columns [g, b, h, p]."""
    state.addcmul_(rows.unsqueeze(-1), columns.unsqueeze(-2))


def _products(C: Tensor, B: Tensor) -> Tensor:
    """C_t B_t of each token, [t, 1, b, h, 1]."""
    return (C * B).sum(dim=-1)[:, None, :, :, None]


def _contract(rows: Tensor, state: Tensor) -> Tensor:
    """[b, h, n], [g, b, h, n, p] -> [g, b, h, p]."""
    return (rows.unsqueeze(-2) @ state).squeeze(-2)


def _sum_products(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = sum over g of a * b."""
    torch.mul(a[0], b[0], out=out)
    for group in range(1, a.shape[0]):
        out.addcmul_(a[group], b[group])


def supports(problem: Problem) -> str | None:
    """Refuses what the chunked backend does in less time and memory."""
    return None if problem.decay_per_channel else "it is for decays that differ between the channels of V"


BACKEND = Backend("loop", supports, run)
