"""Scan by matrix products over chunks of tokens (chunks.py), for decays that the channels of V share.

The chunks are worked off in segments, one after the other, so that the memory beyond inputs and outputs does not grow with seq_len:
the backward keeps the inputs and the state before each segment, and computes the rest of a segment again.
"""

# b batch, t seq_len, h num_local_heads, n state_size, p head_dim, c number of chunks, T tokens of a chunk, q columns of X

import dataclasses

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from megahedge.kernels.chunks import Chunks, Decay, Documents
from megahedge.kernels.problem import Backend, Problem, ScanInputs, ScanOutputs

CHUNK_SIZE = 64
SEGMENT_ROWS = {"cpu": 1 << 13, "cuda": 1 << 17}
"""About how many tokens, times heads and sequences, are worked on at a time, by the type of the device."""


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
        for span in sequence.spans():
            starts.append(state)
            chunks = sequence.chunks(span)
            states = chunks.carry(state)
            for whole, part in zip(outputs, chunks.outputs(states).tensor_split((V.shape[-1],), dim=-1), strict=True):
                whole[:, span] = _join(part, span)
            state = states[-1].clone()
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
        with torch.autocast(C.device.type, enabled=False):
            for span, start in reversed(list(zip(sequence.spans(), starts, strict=True))):
                chunks = sequence.chunks(span)
                slopes = sequence.split(torch.cat((grad_numerator[:, span], grad_denominator[:, span]), dim=-1))
                adjoints = chunks.carry_back(slopes, adjoint)
                gradients.add(span, *chunks.gradients(chunks.carry(start), slopes, adjoints, need_X))
                adjoint = adjoints[0].clone()
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

    def spans(self) -> list[slice]:
        """The segments, whole chunks but for the last."""
        batch, seq_len, heads, _ = self.C.shape
        rows = SEGMENT_ROWS.get(self.C.device.type, SEGMENT_ROWS["cuda"])
        size = max(1, rows // (batch * heads * self.chunk_size)) * self.chunk_size
        return [slice(start, min(start + size, seq_len)) for start in range(0, seq_len, size)]

    def split(self, x: Tensor) -> Tensor:
        """[b, t, h, d] of a segment -> [c, b, h, T, d].  The last chunk is filled up with zeros: tokens that add and decay nothing."""
        missing = -x.shape[1] % self.chunk_size
        x = pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        return x.unflatten(1, (-1, self.chunk_size)).permute(1, 0, 3, 2, 4).contiguous()

    def chunks(self, span: slice) -> Chunks:
        """A segment, steps multiplied in."""
        C, B = self.split(self.C[:, span]), self.split(self.B[:, span])
        if self.problem.step_axis == "state":
            B = B * self.split(self.step[:, span])
        decay = None if self.rate is None else Decay.of(self.decay_step(span), self.rate.unsqueeze(-2))
        starts = None if self.boundaries is None else self.split(self.boundaries[:, span, None, None])
        return Chunks(C, B, self.columns(span), decay, None if starts is None else Documents.of(starts))

    def columns(self, span: slice) -> Tensor:
        """What a segment's states take in, [c, b, h, T, q]: V and 1 for the denominator, times a step that is the same for all n."""
        X = self.split(self.V[:, span])
        unit = self.split(self.step[:, span]) if self.scales_columns else X.new_ones(()).expand(*X.shape[:-1], 1)
        if self.scales_columns:
            X = X * unit
        return torch.cat((X, unit), dim=-1) if self.problem.normalize else X

    @property
    def scales_columns(self) -> bool:
        """Whether the step goes into the columns; else it goes into B, if there is one."""
        return self.problem.step_axis in ("shared", "channel")

    def decay_step(self, span: slice) -> Tensor:
        """The step in the decay, [c, b | 1, h | 1, T, 1 | n]."""
        step = self.V.new_ones(1, self.V.shape[1], 1, 1) if self.step is None else self.step
        return self.split(step[:, span])


class Gradients:
    """Those of a Sequence's tensors, gathered segment by segment from the last to the first."""

    def __init__(self, sequence: Sequence, need_X: bool):
        self.sequence = sequence
        self.C, self.B = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (sequence.C, sequence.B))
        self.V = torch.empty_like(sequence.V, memory_format=torch.contiguous_format) if need_X else None
        self.step = None if sequence.step is None else torch.zeros_like(sequence.step, memory_format=torch.contiguous_format)
        self.rate = None if sequence.rate is None else torch.zeros_like(sequence.rate)

    def add(self, span: slice, C: Tensor, B: Tensor, X: Tensor | None, decay_step: Tensor | None, rate: Tensor | None) -> None:
        """Those that a segment's Chunks give: of C, B and X, steps multiplied in, and of step and rate in the decay."""
        sequence = self.sequence
        self.C[:, span] = _join(C, span)
        step = None if sequence.step is None else sequence.split(sequence.step[:, span])
        grad_step = decay_step
        if sequence.problem.step_axis == "state":
            grad_step = _sum_of(grad_step, (B * sequence.split(sequence.B[:, span])))
            B = B * step
        self.B[:, span] = _join(B, span)
        if X is not None:
            V, unit = X.split((sequence.V.shape[-1], X.shape[-1] - sequence.V.shape[-1]), dim=-1)
            if sequence.scales_columns:
                by_V = (V * sequence.split(sequence.V[:, span])).sum_to_size(step.shape)
                grad_step = _sum_of(grad_step, by_V + unit if sequence.problem.normalize else by_V)
                V = V * step
            self.V[:, span] = _join(V, span)
        if step is not None and grad_step is not None:
            self.step[:, span] = _join(grad_step, span)
        if rate is not None:
            self.rate += rate.squeeze(-2)


def _sum_of(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


def _join(x: Tensor, span: slice) -> Tensor:
    """[c, b, h, T, d] -> [b, t, h, d], a segment's view without what filled it up."""
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : span.stop - span.start]


def supports(problem: Problem) -> str | None:
    """Refuses decays that differ between channels: they are no factor of a pair's weight."""
    return "its decay differs between the channels of V" if problem.decay_per_channel else None


BACKEND = Backend("chunked", supports, run)
