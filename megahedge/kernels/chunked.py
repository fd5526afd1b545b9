"""Scan by matrix products over chunks of tokens (chunks.py), for decays that the channels of V share.

The chunks are worked off in segments, one after the other, so that the memory beyond inputs and outputs does not grow with seq_len:
the backward keeps the inputs and the states between segments, and computes the rest of a segment again.
"""

# b batch, t seq_len, h num_local_heads, n state_size, p head_dim, c number of chunks, T tokens of a chunk, q columns of X

import dataclasses

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from megahedge.kernels.chunks import Chunks, Decay, Documents
from megahedge.kernels.problem import Backend, Problem, ScanInputs, ScanOutputs
from megahedge.utils.precision import full_precision

CHUNK_SIZE = 64
SEGMENT_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""About how many elements of C are worked on at a time, by the type of the device.

Products of matrices that come from memory take twice as long as from the cache, which should hold some ten tensors of that size.
"""

Segment = tuple[slice, slice]
"""Some sequences, and some of their tokens: whole chunks but for the last segment."""


def run(inputs: ScanInputs) -> ScanOutputs:
    """Shapes as in ScanInputs."""
    problem = inputs.problem
    step = None if problem.step_axis is None else inputs.step.squeeze(-2 if problem.step_axis == "channel" else -1)
    rate = None if inputs.rate is None else inputs.rate.squeeze(-1)
    state = inputs.numerator if inputs.denominator is None else torch.cat((inputs.numerator, inputs.denominator), dim=-1)
    numerator, denominator, state = _ChunkedScan.apply(inputs.C, inputs.B, inputs.V, step, rate, state, inputs.boundaries, problem)
    if inputs.denominator is None:
        return numerator, None, state, None
    columns = (problem.head_dim, state.shape[-1] - problem.head_dim)
    return numerator, denominator, *(part.contiguous() for part in state.split(columns, dim=-1))


class _ChunkedScan(torch.autograd.Function):
    """C, B, V, step, rate and boundaries as in Sequence, state [b, h, n, q].

    Returns numerator [b, t, h, p], denominator [b, t, h, q - p] and the last state.
    """

    @staticmethod
    def forward(ctx, C, B, V, step, rate, state, boundaries, problem):
        sequence = Sequence(C, B, V, step, rate, boundaries, problem)
        outputs = [C.new_empty(*C.shape[:3], width) for width in (V.shape[-1], state.shape[-1] - V.shape[-1])]
        starts = []
        for stretch in sequence.stretches():
            starts.append(state)
            state = torch.empty_like(state)
            for segment in stretch:
                chunks = sequence.chunks(segment)
                states = chunks.carry(starts[-1][segment[0]])
                for whole, part in zip(outputs, chunks.outputs(states).tensor_split((V.shape[-1],), dim=-1), strict=True):
                    _store(part, whole, segment)
                state[segment[0]] = states[-1]
        ctx.save_for_backward(C, B, V, step, rate, boundaries, *starts)
        ctx.problem = problem
        return *outputs, state

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_numerator, grad_denominator, adjoint):
        C, B, V, step, rate, boundaries, *starts = ctx.saved_tensors
        sequence = Sequence(C, B, V, step, rate, boundaries, ctx.problem)
        need_X = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        gradients = Gradients(sequence, need_X)
        with full_precision(C):
            for stretch, start in reversed(list(zip(sequence.stretches(), starts, strict=True))):
                after, adjoint = adjoint, torch.empty_like(adjoint)
                for segment in stretch:
                    chunks = sequence.chunks(segment)
                    slopes = torch.cat([sequence.cut(x[segment]) for x in (grad_numerator, grad_denominator)], dim=-1)
                    adjoints = chunks.carry_back(slopes, after[segment[0]])
                    gradients.add(segment, *chunks.gradients(chunks.carry(start[segment[0]]), slopes, adjoints, need_X))
                    adjoint[segment[0]] = adjoints[0]
        return gradients.C, gradients.B, gradients.V, gradients.step, gradients.rate, adjoint, None, None


@dataclasses.dataclass(frozen=True)
class Sequence:
    """What is scanned, and how it is cut."""

    C: Tensor
    """[b, t, h, n]"""
    B: Tensor
    """[b, t, h, n]"""
    V: Tensor
    """[b, t, h, p]"""
    step: Tensor | None
    """[b, t, h, 1 | n | p]; None where every step is 1."""
    rate: Tensor | None
    """[1 | h, 1 | n]"""
    boundaries: Tensor | None
    """[b, t] bool"""
    problem: Problem

    @property
    def chunk_size(self) -> int:
        """CHUNK_SIZE, or the next power of two above a shorter sequence."""
        return min(CHUNK_SIZE, 1 << (self.C.shape[1] - 1).bit_length())

    def stretches(self) -> list[list[Segment]]:
        """All segments, those of the same tokens together."""
        batch, seq_len, heads, state_size = self.C.shape
        elements = SEGMENT_ELEMENTS.get(self.C.device.type, SEGMENT_ELEMENTS["cuda"])
        chunks = max(1, elements // (heads * self.chunk_size * state_size))
        sequences = [slice(first, first + chunks) for first in range(0, batch, chunks)]
        size = max(1, chunks // batch) * self.chunk_size
        return [[(part, slice(start, min(start + size, seq_len))) for part in sequences] for start in range(0, seq_len, size)]

    def cut(self, x: Tensor) -> Tensor:
        """View of a segment [b, t, h, d], [c, b, h, T, d].  A last chunk is filled up with zeros: tokens that add and decay nothing."""
        missing = -x.shape[1] % self.chunk_size
        x = pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        return x.unflatten(1, (-1, self.chunk_size)).permute(1, 0, 3, 2, 4)

    def split(self, x: Tensor) -> Tensor:
        """The same for products of matrices, which read one head after the other."""
        return self.cut(x).contiguous()

    def chunks(self, segment: Segment) -> Chunks:
        """A segment, steps multiplied in."""
        C, B = self.split(self.C[segment]), self.split(self.B[segment])
        if self.problem.step_axis == "state":
            B = B * self.split(self.step[segment])
        decay = None if self.rate is None else Decay.of(self.decay_step(segment), self.rate.unsqueeze(-2))
        starts = None if self.boundaries is None else self.split(self.boundaries[segment][..., None, None])
        return Chunks(C, B, self.columns(segment), decay, None if starts is None else Documents.of(starts))

    def columns(self, segment: Segment) -> Tensor:
        """What a segment's states take in, [c, b, h, T, q]: V and 1 for the denominator, times a step that is the same for all n."""
        X = self.cut(self.V[segment])
        unit = self.cut(self.step[segment]) if self.scales_columns else X.new_ones(()).expand(*X.shape[:-1], 1)
        if self.scales_columns:
            X = X * unit
        return torch.cat((X, unit), dim=-1) if self.problem.normalize else X.contiguous()

    @property
    def scales_columns(self) -> bool:
        """Whether the step goes into the columns; else it goes into B, if there is one."""
        return self.problem.step_axis in ("shared", "channel")

    def decay_step(self, segment: Segment) -> Tensor:
        """The step in the decay, [c, b | 1, h | 1, T, 1 | n]."""
        return self.split(self.V.new_ones(1, segment[1].stop - segment[1].start, 1, 1) if self.step is None else self.step[segment])


class Gradients:
    """Those of a Sequence's tensors, gathered segment by segment from the last to the first."""

    def __init__(self, sequence: Sequence, need_X: bool):
        self.sequence = sequence
        self.C, self.B = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (sequence.C, sequence.B))
        self.V = torch.empty_like(sequence.V, memory_format=torch.contiguous_format) if need_X else None
        self.step = None if sequence.step is None else torch.zeros_like(sequence.step, memory_format=torch.contiguous_format)
        self.rate = None if sequence.rate is None else torch.zeros_like(sequence.rate)

    def add(self, segment: Segment, C: Tensor, B: Tensor, X: Tensor | None, decay_step: Tensor | None, rate: Tensor | None) -> None:
        """Those that a segment's Chunks give: of C, B and X, steps multiplied in, and of step and rate in the decay."""
        sequence = self.sequence
        _store(C, self.C, segment)
        step = None if sequence.step is None else sequence.split(sequence.step[segment])
        grad_step = decay_step
        if sequence.problem.step_axis == "state":
            grad_step = _sum_of(grad_step, (B * sequence.split(sequence.B[segment])))
            B = B * step
        _store(B, self.B, segment)
        if X is not None:
            V, unit = X.split((sequence.V.shape[-1], X.shape[-1] - sequence.V.shape[-1]), dim=-1)
            if sequence.scales_columns:
                by_V = (V * sequence.split(sequence.V[segment])).sum_to_size(step.shape)
                grad_step = _sum_of(grad_step, by_V + unit if sequence.problem.normalize else by_V)
                V = V * step
            _store(V, self.V, segment)
        if step is not None and grad_step is not None:
            _store(grad_step, self.step, segment)
        if rate is not None:
            self.rate += rate.squeeze(-2)


def _sum_of(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


def _store(x: Tensor, whole: Tensor, segment: Segment) -> None:
    """Put a segment's x [c, b, h, T, d], less what filled it up, into whole [b, t, h, d]."""
    x, target = x.permute(1, 0, 3, 2, 4), whole[segment]
    if x.shape[1] * x.shape[2] == target.shape[1]:
        target.unflatten(1, x.shape[1:3]).copy_(x)
    else:
        target.copy_(x.flatten(1, 2)[:, : target.shape[1]])


def supports(problem: Problem) -> str | None:
    """Refuses decays that differ between channels: they are no factor of a pair's weight."""
    return "its decay differs between the channels of V" if problem.decay_per_channel else None


BACKEND = Backend("chunked", supports, run)
