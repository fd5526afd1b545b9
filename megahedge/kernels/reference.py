"""The definition of the scan: the recurrence, one token after the other, in fp64."""

# b batch, t seq_len, h num_local_heads, n state_size, p head_dim

import torch
from torch import Tensor

from megahedge.kernels.problem import Backend, Problem, ScanInputs, ScanOutputs


def advance(state: Tensor, keep: Tensor | None, B: Tensor, V: Tensor, step: Tensor) -> Tensor:
    """One token: keep * state + step * (B outer V).

    state [b, h, n, p], keep = exp(-rate * step) [b, h, 1 | n, 1 | p] or None (= 1), B [b, h, n], V [b, h, p], step [b, h, 1 | n, 1 | p].
    """
    kept = state if keep is None else keep * state
    return kept + step * (B.unsqueeze(-1) * V.unsqueeze(-2))


def read(C: Tensor, state: Tensor) -> Tensor:
    """C_t h_t: C [b, h, n], state [b, h, n, p] -> [b, h, p]."""
    return (C.unsqueeze(-1) * state).sum(dim=-2)


def run(inputs: ScanInputs) -> ScanOutputs:
    """Token loop under plain autograd.  fp64 throughout, so that its own rounding is not what others are compared with."""
    dtype = inputs.problem.dtype
    C, B, V, step = (x.double() for x in (inputs.C, inputs.B, inputs.V, inputs.step))
    h = inputs.numerator.double()
    z = None if inputs.denominator is None else inputs.denominator.double()
    unit = None if z is None else V.new_ones(*V.shape[:1], V.shape[2], z.shape[-1])
    numerators, denominators = [], []
    for t in range(C.shape[1]):
        keep = None if inputs.rate is None else torch.exp(-inputs.rate.double() * step[:, t])
        if inputs.boundaries is not None:
            new_document = inputs.boundaries[:, t, None, None, None]
            h = h.masked_fill(new_document, 0.0)
            z = None if z is None else z.masked_fill(new_document, 0.0)
        h = advance(h, keep, B[:, t], V[:, t], step[:, t])
        numerators.append(read(C[:, t], h))
        if z is not None:
            z = advance(z, keep, B[:, t], unit, step[:, t])
            denominators.append(read(C[:, t], z))
    numerator = torch.stack(numerators, dim=1).to(dtype)
    denominator = None if z is None else torch.stack(denominators, dim=1).to(dtype)
    return numerator, denominator, h.to(dtype), None if z is None else z.to(dtype)


def supports(problem: Problem) -> str | None:
    """It runs everything."""
    return None


BACKEND = Backend("reference", supports, run)
