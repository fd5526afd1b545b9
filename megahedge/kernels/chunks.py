"""The algebra of the chunked scan: what happens inside chunks of T tokens, and the state that goes from one to the next.

With a_t = -rate * step_t <= 0, L_i its sum over the chunk's tokens up to i, and X the columns of V followed by those of the
denominator (a step comes multiplied into B, if it varies over n, or into X), a chunk that starts from the state S [n, q] gives

    out_i = sum_{j <= i} (C_i exp(L_i - L_j) . B_j) X_j  +  C_i exp(L_i) S
    S'    = exp(L_T) S  +  sum_j (exp(L_T - L_j) B_j) outer X_j.

A weight's exp(L_i - L_j) is split in the middle into exp(L_i - L_T / 2) for C_i and exp(L_T / 2 - L_j) for B_j, as long as that costs
no digits.  Stronger decays are parted by halving: between a token of a second half and one of the first the sum parts at the
middle into two sums <= 0, so that each such corner is a matrix product; what is left along the diagonal are blocks that are small
enough to be split at their middle, in the worst case single tokens.

Backward: a_t weighs the pairs (i, j) with j < t <= i, and such a pair adds the same number to C_i dC_i as to B_j dB_j, so that
    d a_t = sum_{i >= t} (C_i dC_i - B_i dB_i) + S' dS'    (elementwise in n, over the chunk, dS' the adjoint of S').
Pairs that a_t does not weigh cancel in this, which strong decays cannot afford: there the sums are taken corner by corner, where
nothing cancels.  What a token gives to itself is left out from the start.
"""

# c number of chunks, b batch, h num_local_heads, T tokens of a chunk, n state_size, q columns of X, a 1 or n

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import pad

MAX_DECAY = 80.0
"""Largest sum of |a| that is split in the middle: exponents of -40 to 40, far from fp32's overflow at 88, whose rounding costs a
weight 2e-6 of itself."""


@dataclasses.dataclass(frozen=True)
class Level:
    """Blocks of `size` tokens along the diagonal, or with `corner` those of second halves against first halves of 2 * size tokens."""

    size: int
    corner: bool
    rows: Tensor
    """[c, b, h, blocks, size, a]: factor of C."""
    columns: Tensor
    """[c, b, h, blocks, size, a]: factor of B."""

    def later(self, x: Tensor) -> Tensor:
        """View of [c, b, h, T, d], [c, b, h, blocks, size, d]: the tokens that look."""
        return x.unflatten(-2, (-1, 2, self.size))[..., 1, :, :] if self.corner else x.unflatten(-2, (-1, self.size))

    def earlier(self, x: Tensor) -> Tensor:
        """The same of the tokens that are looked at."""
        return x.unflatten(-2, (-1, 2, self.size))[..., 0, :, :] if self.corner else x.unflatten(-2, (-1, self.size))

    def blocks(self, weights: Tensor) -> Tensor:
        """View of weights [c, b, h, T, T]: [c, b, h, blocks, size, size]."""
        halves = 2 if self.corner else 1
        parted = weights.unflatten(-1, (-1, halves, self.size)).unflatten(-4, (-1, halves, self.size))
        return parted[..., halves - 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


@dataclasses.dataclass(frozen=True)
class Decay:
    """Exponentials of sums of a = -rate * step, as factors of C, of B and of the state."""

    step: Tensor
    """[c, b, h, T, 1 | n]"""
    rate: Tensor
    """[1 | h, 1, 1 | n]; a is n if step or rate varies over it."""
    rows: Tensor
    """[c, b, h, T, a]: of a C that reads the first state."""
    columns: Tensor | None
    """[c, b, h, T, a]: of a B that goes into the last one; None for 1 / rows."""
    entering: Tensor | None
    """[c, b, h, a, 1]: of the first state when C * rows reads it; None for 1."""
    leaving: Tensor | None
    """[c, b, h, a, 1]: of what B * columns adds up to; None for 1."""
    whole: Tensor
    """[c, b, h, a, 1]: of the first state in the last one."""
    levels: tuple[Level, ...]
    """How pairs of tokens are weighted; none where C * rows and B * columns do for them too."""

    @classmethod
    def of(cls, step: Tensor, rate: Tensor) -> "Decay":
        """Split at the middle of each chunk where no sum over a chunk is too large for that, else level by level."""
        total = -rate * step.sum(dim=-2, keepdim=True)
        if _strongest(total) > MAX_DECAY:
            a = -rate * step
            return cls(step, rate, _sums_up_to(a).exp(), _sums_after(a).exp(), None, None, total.exp().mT, tuple(_levels(a)))
        elapsed = step.double().cumsum(dim=-2)  # in fp32 it would lose as much as the exponent
        from_middle = (elapsed - elapsed[..., -1:, :] / 2).to(step.dtype)
        half = (total / 2).exp().mT
        return cls(step, rate, (-rate * from_middle).exp_(), None, half, half, half * half, ())

    def scale_earlier(self, x: Tensor) -> Tensor:
        """x [c, b, h, T, n] times `columns`."""
        return x / self.rows if self.columns is None else x * self.columns


def _levels(a: Tensor) -> list[Level]:
    """Blocks as large as can be split in the middle, and all corners beyond them."""
    size = max(1, a.shape[-2] // 2)
    while size > 1 and _strongest(_within_blocks(a, size)[..., -1:, :]) > MAX_DECAY:
        size //= 2
    sums = _within_blocks(a, size)
    sums = sums - sums[..., -1:, :] / 2
    levels = [Level(size, False, sums.exp(), (-sums).exp())]
    while size < a.shape[-2]:
        halves = a.unflatten(-2, (-1, 2, size))
        levels.append(Level(size, True, _sums_up_to(halves[..., 1, :, :]).exp(), _sums_after(halves[..., 0, :, :]).exp()))
        size *= 2
    return levels


def _within_blocks(a: Tensor, size: int) -> Tensor:
    """[c, b, h, T, a] -> [c, b, h, blocks, size, a]: sums up to each token but for the first one's, which is part of no pair."""
    blocks = a.unflatten(-2, (-1, size)).clone()
    blocks[..., 0, :] = 0.0
    return _sums_up_to(blocks)


def _strongest(sums: Tensor) -> float:
    return -sums.min().item()


def _sums_up_to(x: Tensor) -> Tensor:
    """[..., T, d] -> [..., T, d]: sum over k <= i."""
    return x.cumsum(dim=-2)


def _sums_from(x: Tensor) -> Tensor:
    """Sum over k >= j, added up from the end: a total less a sum would lose the digits of the last ones."""
    return x.flip(-2).cumsum(dim=-2).flip(-2)


def _sums_before(x: Tensor) -> Tensor:
    """Sum over k < i, without x_i from the start: taken off again, a large one would leave none of the others' digits."""
    return pad(x[..., :-1, :], (0, 0, 1, 0)).cumsum(dim=-2)


def _sums_after(x: Tensor) -> Tensor:
    """Sum over k > j, likewise."""
    return _sums_before(x.flip(-2)).flip(-2)


@dataclasses.dataclass(frozen=True)
class Documents:
    """Which tokens of a chunk belong to the first state, to the last one, and to each other."""

    first: Tensor
    """[c, b, 1, T, 1] bool: no document has begun before or at the token."""
    last: Tensor
    """[c, b, 1, T, 1] bool: none begins after it."""
    same: Tensor
    """[c, b, 1, T, T] bool."""

    @classmethod
    def of(cls, starts: Tensor) -> "Documents":
        """starts [c, b, 1, T, 1] bool."""
        count = starts.long().cumsum(dim=-2)
        return cls(count == 0, count == count[..., -1:, :], count == count.mT)


class Chunks:
    """A stretch of chunks, one after the other.

    C, B [c, b, h, T, n], X [c, b, h, T, q]; decay None for none, documents None where there is one only.
    """

    def __init__(self, C: Tensor, B: Tensor, X: Tensor, decay: Decay | None, documents: Documents | None):
        self.C, self.B, self.X, self.decay, self.documents = C, B, X, decay, documents
        self.rows = C if decay is None else C * decay.rows
        self.columns = B if decay is None else decay.scale_earlier(B)
        self.reading = self.rows if documents is None else self.rows * documents.first
        self.writing = self.columns if documents is None else self.columns * documents.last

    def carry(self, state: Tensor) -> Tensor:
        """From the state before the first chunk [b, h, n, q] those before each chunk and after the last, [c + 1, b, h, n, q]."""
        updates = _product(self.writing.mT, self.X)
        if self.decay is not None and self.decay.leaving is not None:
            updates *= self.decay.leaving
        states = state.new_empty(len(updates) + 1, *state.shape)
        states[0] = state
        for chunk, update in enumerate(updates):
            self._pass_on(states[chunk], chunk, update, out=states[chunk + 1])
        return states

    def carry_back(self, slopes: Tensor, adjoint: Tensor) -> Tensor:
        """From the outputs' gradients [c, b, h, T, q] and that of the last state those of all states, as `carry` returns them."""
        reads = _product(self.reading.mT, slopes)
        if self.decay is not None and self.decay.entering is not None:
            reads *= self.decay.entering
        adjoints = adjoint.new_empty(len(reads) + 1, *adjoint.shape)
        adjoints[-1] = adjoint
        for chunk in reversed(range(len(reads))):
            self._pass_on(adjoints[chunk + 1], chunk, reads[chunk], out=adjoints[chunk])
        return adjoints

    def _pass_on(self, state: Tensor, chunk: int, addend: Tensor, *, out: Tensor) -> None:
        """out = addend + what of a state passes through a chunk; the adjoint goes back the same way."""
        kept = None if self.decay is None else self.decay.whole[chunk]
        if self.documents is not None:
            unbroken = self.documents.first[chunk, :, :, -1:].to(state.dtype)
            kept = unbroken if kept is None else kept * unbroken
        if kept is None:
            torch.add(addend, state, out=out)
        else:
            torch.addcmul(addend, state, kept, out=out)

    def outputs(self, states: Tensor) -> Tensor:
        """[c, b, h, T, q]."""
        outputs = _product(self._weights(), self.X)
        return _add_product(outputs, self.reading, self._entering(states[:-1]))

    def gradients(self, states: Tensor, slopes: Tensor, adjoints: Tensor, need_X: bool) -> tuple[Tensor | None, ...]:
        """Gradients of C, B, X (None unless needed), and of the step and the rate in the decay (None without one).

        states and adjoints as `carry` and `carry_back` return them, slopes like the outputs.
        """
        leaving = self._leaving(adjoints[1:])
        grad_X = None
        if need_X:
            grad_X = _add_product(_product(self._weights().mT, slopes), self.writing, leaving)
        grad_C, grad_B = _product(slopes, self._entering(states[:-1]).mT), _product(self.X, leaving.mT)
        if self.documents is not None:
            grad_C *= self.documents.first
            grad_B *= self.documents.last
        grad_weights = self._hide(_product(slopes, self.X.mT))
        if self.decay is None:
            return _add_product(grad_C, grad_weights, self.B), _add_product(grad_B, grad_weights.mT, self.C), grad_X, None, None
        own = grad_weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).clone()
        grad_weights.diagonal(dim1=-2, dim2=-1).zero_()
        finish = self._finish_strong if self.decay.levels else self._finish
        grad_step, grad_rate = finish(grad_C, grad_B, grad_weights, states, adjoints)
        return grad_C.addcmul_(own, self.B), grad_B.addcmul_(own, self.C), grad_X, grad_step, grad_rate

    def _finish(self, grad_C: Tensor, grad_B: Tensor, grad_weights: Tensor, states: Tensor, adjoints: Tensor) -> tuple[Tensor, Tensor]:
        """Add the pairs of different tokens to the gradients, which hold the share of the states without the factors of the decay.

        Returns the gradients of the decay's step and rate.  A sum of a up to a token is -rate * (sum of steps up to it), so that
        the sums over n and over tokens come before any running sum.
        """
        step, rate = self.decay.step, self.decay.rate
        _add_product(grad_C, grad_weights, self.columns).mul_(self.decay.rows)
        _add_product(grad_B, grad_weights.mT, self.rows).div_(self.decay.rows)
        by_sum = self._reduce((self.C * grad_C).addcmul_(self.B, grad_B, value=-1))
        by_last = self._reduce((states[1:] * adjoints[1:]).sum(dim=-1).unsqueeze(-2))
        elapsed = step.cumsum(dim=-2)
        grad_rate = (by_sum * elapsed).sum_to_size(rate.shape) + (by_last * elapsed[..., -1:, :]).sum_to_size(rate.shape)
        by_sum, by_last = ((x * rate).sum_to_size(*x.shape[:-1], step.shape[-1]) for x in (by_sum, by_last))
        return -(_sums_from(by_sum) + by_last), -grad_rate

    def _finish_strong(
        self, grad_C: Tensor, grad_B: Tensor, grad_weights: Tensor, states: Tensor, adjoints: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same where pairs are weighted level by level."""
        through = (states[:-1] * adjoints[1:]).sum(dim=-1).unsqueeze(-2) * self.decay.whole.mT
        if self.documents is not None:
            through *= self.documents.first[..., -1:, :]
        grad_C *= self.decay.rows
        grad_B *= self.decay.columns
        grad_a = self._reduce(through) + _sums_from(self._reduce(self.C * grad_C)) + _sums_before(self._reduce(self.B * grad_B))
        for level in self.decay.levels:
            blocks, C, B = level.blocks(grad_weights), level.later(self.C), level.earlier(self.B)
            of_later, of_earlier = blocks @ (B * level.columns) * level.rows, blocks.mT @ (C * level.rows) * level.columns
            level.later(grad_C).add_(of_later)
            level.earlier(grad_B).add_(of_earlier)
            of_later, of_earlier = self._reduce(C * of_later), self._reduce(B * of_earlier)
            if level.corner:
                level.later(grad_a).add_(_sums_from(of_later))
                level.earlier(grad_a).add_(_sums_before(of_earlier))
            else:
                level.later(grad_a).add_(_sums_from(of_later - of_earlier))
        step, rate = self.decay.step, self.decay.rate
        return -(grad_a * rate).sum_to_size(*grad_a.shape[:-1], step.shape[-1]), -(grad_a * step).sum_to_size(rate.shape)

    def _reduce(self, by_state: Tensor) -> Tensor:
        """[..., n] -> [..., a]."""
        return by_state if self.decay.rows.shape[-1] > 1 else by_state.sum(dim=-1, keepdim=True)

    def _weights(self) -> Tensor:
        """Of each pair of tokens, [c, b, h, T, T]."""
        if self.decay is None or not self.decay.levels:
            return self._hide(_product(self.rows, self.columns.mT))
        size = self.C.shape[-2]
        weights = self.C.new_zeros(*self.C.shape[:-1], size)
        for level in self.decay.levels:
            level.blocks(weights).copy_((level.later(self.C) * level.rows) @ (level.earlier(self.B) * level.columns).mT)
        return self._hide(weights)

    def _hide(self, pairs: Tensor) -> Tensor:
        """0 where a token would look ahead or into another document."""
        pairs = pairs.tril_()
        return pairs if self.documents is None else pairs.masked_fill_(~self.documents.same, 0.0)

    def _entering(self, states: Tensor) -> Tensor:
        return states if self.decay is None or self.decay.entering is None else states * self.decay.entering

    def _leaving(self, adjoints: Tensor) -> Tensor:
        return adjoints if self.decay is None or self.decay.leaving is None else adjoints * self.decay.leaving


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b over the same batch dimensions, as one batch of matrices."""
    return torch.bmm(a.flatten(0, -3), b.flatten(0, -3)).unflatten(0, a.shape[:-2])


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """out += a @ b, likewise."""
    out.flatten(0, -3).baddbmm_(a.flatten(0, -3), b.flatten(0, -3))
    return out
