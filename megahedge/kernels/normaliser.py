"""The division that turns a linear recurrence into attention, and the count of denominators that it had to mend."""

import dataclasses

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def normalise(numerator: Tensor, denominator: Tensor, eps: float) -> Tensor:
    """numerator / denominator, where a denominator of magnitude below `eps` becomes eps of the same sign; zero counts as positive.

    Positive features need no more than an eps that keeps 0 / 0 finite (real text has denominators of 4e-8); with features of
    either sign a denominator can pass through zero.  A denominator so replaced is a constant: it has no gradient.
    The numerator's memory becomes that of the quotient.
    """
    return _Quotient.apply(numerator, denominator, eps)


def divisor_of(denominator: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What is divided by, and where that is not the denominator but the eps that has replaced it."""
    small = denominator.abs() < eps
    floor = torch.full_like(denominator, eps).masked_fill_(denominator < 0, -eps)
    return torch.where(small, floor, denominator), small


class _Quotient(torch.autograd.Function):
    """What autograd makes of a division needs three tensors more of the numerator's size, and reads them from memory seven times."""

    @staticmethod
    def forward(ctx, numerator, denominator, eps):
        divisor, small = divisor_of(denominator, eps)
        ctx.mark_dirty(numerator)
        quotient = numerator.div_(divisor)
        ctx.save_for_backward(quotient, divisor, small)
        return quotient

    @staticmethod
    @once_differentiable
    def backward(ctx, slope):
        quotient, divisor, small = ctx.saved_tensors
        grad_numerator = slope / divisor
        grad_denominator = -(grad_numerator * quotient).sum_to_size(divisor.shape)
        return grad_numerator, grad_denominator.masked_fill_(small, 0.0), None


@dataclasses.dataclass
class DenominatorStats:
    """Counts of the denominators that scans have met; give one to `scan(stats=...)`, as often as wanted, and read it for a log.

    Counts stay on the device until they are read, so that a scan waits for nothing.  A NaN counts in the total alone.
    """

    total: int = 0
    clamped: Tensor | int = 0
    """How many were below eps in magnitude and were replaced."""
    negative: Tensor | int = 0
    """How many were below zero: none with positive features."""

    @torch.no_grad()
    def add(self, denominator: Tensor, eps: float) -> None:
        """Count the denominators of one scan."""
        self.total += denominator.numel()
        self.clamped = self.clamped + (denominator.abs() < eps).sum()
        self.negative = self.negative + (denominator < 0).sum()
