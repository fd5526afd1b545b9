"""Launching the kernels for decays that the channels of V share (triton_chunk_kernels.py)."""

# b batch, t seq_len, h num_local_heads, n state_size, p columns of V, c chunks

import math

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megahedge.kernels import triton_chunk_kernels as kernels
from megahedge.kernels.problem import ScanInputs, ScanOutputs
from megahedge.kernels.tiles import chunk_tile, state_chunk_tile
from megahedge.kernels.triton_launch import like, on_device_of

_LOG2_E = 1 / math.log(2)
_PRODUCTS = {torch.bfloat16: (tl.bfloat16, "ieee"), torch.float16: (tl.float16, "ieee"), torch.float32: (tl.float32, "tf32x3")}
"""Operands of matrix products by the dtype of V, and how fp32 is multiplied: by three products of its upper and lower halves, which keep
its digits.  Where V has 16 bits, so have the operands; all sums are fp32."""
_DTYPES = {tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float32: torch.float32}


def run(inputs: ScanInputs) -> ScanOutputs:
    """Shapes as in ScanInputs.  Steps are multiplied in by the kernels where they are one a token, else before."""
    problem, B, V = inputs.problem, inputs.B, inputs.V
    weight = None
    if problem.step_axis == "shared":
        weight = inputs.step[..., 0, 0]
    elif problem.step_axis == "state":
        B = B * inputs.step.squeeze(-1)
    elif problem.step_axis == "channel":
        return _by_channel(inputs)
    log_decay = None
    if inputs.rate is not None:
        log_decay = (-_LOG2_E * inputs.rate * inputs.step).squeeze(-1)  # [b, t, h, 1 | n]
        if log_decay.shape[-1] == 1:
            log_decay = log_decay.squeeze(-1)
        elif weight is not None:
            B, weight = B * weight.unsqueeze(-1), None
    z = None if inputs.denominator is None else inputs.denominator.squeeze(-1)
    outputs = _ChunkScan.apply(inputs.C, B, V, log_decay, weight, inputs.numerator, z, inputs.boundaries)
    if z is None:
        return outputs[0], None, outputs[1], None
    numerator, denominator, h, z = outputs
    return numerator, denominator.unsqueeze(-1), h, z.unsqueeze(-1)


def _by_channel(inputs: ScanInputs) -> ScanOutputs:
    """Without decay but with a step by channel, the denominator differs between channels: it is as many columns more."""
    step, widths = inputs.step.squeeze(-2), (inputs.V.shape[-1],) * 2
    columns, state = inputs.V * step, inputs.numerator
    if inputs.denominator is not None:
        columns, state = torch.cat((columns, step), dim=-1), torch.cat((state, inputs.denominator), dim=-1)
    outputs, state = _ChunkScan.apply(inputs.C, inputs.B, columns, None, None, state, None, inputs.boundaries)
    if inputs.denominator is None:
        return outputs, None, state, None
    return tuple(part.contiguous() for x in (outputs, state) for part in x.split(widths, dim=-1))


class _ChunkScan(torch.autograd.Function):
    """C, B [b, t, h, n], V [b, t, h, p], log_decay (to base 2) [b, t, h] or [b, t, h, n], weight [b, t, h],
    h [b, h, n, p], z [b, h, n], boundaries [b, t]; None for no decay, a weight of 1, no denominator, one document.  By state there is no
    weight.

    Returns numerator [b, t, h, p] and denominator [b, t, h] and the last h and z; without z neither denominator nor z.
    """

    @staticmethod
    def forward(ctx, C, B, V, log_decay, weight, h, z, boundaries):
        tensors = [x if x is None else x.contiguous() for x in (C, B, V, log_decay, weight, h, z, boundaries)]
        ctx.save_for_backward(*tensors)
        return chunk_forward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *slopes):
        return *chunk_backward(*ctx.saved_tensors, *slopes), None


def chunk_forward(C, B, V, log_decay, weight, h, z, boundaries) -> tuple[Tensor, ...]:
    """See _ChunkScan; all contiguous."""
    launch = _ChunkLaunch(C, V, log_decay, weight, boundaries, z is not None)
    states, states_z, last_h, last_z = launch.walk(B, V, None, h, z)
    numerator, denominator = like(V), None if z is None else V.new_empty(V.shape[:3], dtype=torch.float32)
    launch.outputs(C, B, V, launch.pairs(C, B), states, states_z, numerator, denominator)
    return (numerator, last_h) if z is None else (numerator, denominator, last_h, last_z)


def chunk_backward(C, B, V, log_decay, weight, h, z, boundaries, *slopes: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of C, B, V, log_decay, weight, h and z from those of what chunk_forward has returned."""
    launch = _ChunkLaunch(C, V, log_decay, weight, boundaries, z is not None)
    slope, slope_z, grad_h, grad_z = slopes if z is not None else (slopes[0], None, slopes[1], None)
    slope, slope_z, grad_h, grad_z = (x if x is None else x.contiguous() for x in (slope, slope_z, grad_h, grad_z))
    states, states_z, _, _ = launch.walk(B, V, None, h, z)
    adjoints, adjoints_z, grad_h, grad_z = launch.walk(C, slope, slope_z, grad_h, grad_z, reverse=True)
    grad_C, grad_B, grad_V = like(C), like(B), like(V)
    tangents = (states, states_z, slope, slope_z, adjoints, adjoints_z)
    grad_log, grad_weight = launch.gradients_of_features(C, B, V, tangents, grad_C, grad_B)
    launch.gradients_of_values(C, B, launch.pairs(C, B), slope, adjoints, grad_V)
    return grad_C, grad_B, grad_V, grad_log, grad_weight, grad_h, grad_z


class _ChunkLaunch:
    """Starts the kernels of triton_chunk_kernels.py."""

    def __init__(self, C: Tensor, V: Tensor, log_decay: Tensor | None, weight: Tensor | None, boundaries: Tensor | None, normalize: bool):
        self._batch, self._seq_len, self._heads, state_size = C.shape
        head_dim = V.shape[-1]
        self._log_decay, self._weight, self._boundaries = log_decay, weight, boundaries
        self._by_state = log_decay is not None and log_decay.dim() == 4
        self._tile = tile = state_chunk_tile(state_size, head_dim) if self._by_state else chunk_tile(state_size, head_dim)
        self._tiles_p, self._tiles_n = -(-head_dim // tile.channels), -(-state_size // tile.states)
        self._chunks = -(-self._seq_len // tile.tokens)
        dot, precision = _PRODUCTS[V.dtype]
        self._states_dtype = _DTYPES[dot]
        self._sizes = {"N": state_size, "P": head_dim, "T": tile.tokens, "BLOCK_N": tile.states, "BLOCK_P": tile.channels}
        self._products = {"DOT": dot, "PRECISION": precision}
        decays = kernels.BY_STATE if self._by_state else kernels.NO_DECAY if log_decay is None else kernels.BY_HEAD
        self._kind = {"DECAYS": decays, "WEIGHTED": weight is not None}
        self._normalize, self._resets = {"NORMALIZE": normalize}, {"HAS_RESETS": boundaries is not None}

    def walk(self, keys: Tensor, values: Tensor, slope_z: Tensor | None, h: Tensor, z: Tensor | None, *, reverse: bool = False):
        """The states before each chunk and the last one, or with `reverse` the adjoints after each and the first: h and z of all, h, z."""
        lead = (self._batch, self._heads, self._chunks)
        states, last = h.new_empty(*lead, *h.shape[2:], dtype=self._states_dtype), like(h)
        states_z, last_z = (None, None) if z is None else (z.new_empty(*lead, z.shape[-1], dtype=torch.float32), like(z))
        tensors = (keys, values, self._log_decay, self._weight, self._boundaries, slope_z, h, z, states, states_z, last, last_z)
        constants = self._sizes | self._products | self._kind | self._normalize | self._resets | {"REVERSE": reverse}
        self._launch(kernels.walk, (self._batch * self._heads, self._tiles_p, self._tiles_n), tensors, constants)
        return states, states_z, last, last_z

    def pairs(self, C: Tensor, B: Tensor) -> Tensor | None:
        """Weights of pairs of tokens, [b, t, h, T]; None where other kernels find them by matrix products."""
        if not self._by_state:
            return None
        pairs = C.new_empty(*C.shape[:3], self._tile.tokens, dtype=torch.float32)
        constants = {name: self._sizes[name] for name in ("N", "T", "BLOCK_N")} | self._resets
        grid = (self._chunks, self._batch * self._heads)
        self._launch(kernels.pairs_by_state, grid, (C, B, self._log_decay, self._boundaries, pairs), constants)
        return pairs

    def outputs(self, C: Tensor, B: Tensor, V: Tensor, pairs: Tensor | None, *states_and_outputs: Tensor | None) -> None:
        """Fill numerator and denominator."""
        tensors = (C, B, V, self._log_decay, self._weight, self._boundaries, pairs, *states_and_outputs)
        constants = self._sizes | self._products | self._kind | self._normalize | self._resets
        self._launch(kernels.outputs, self._of_chunks(self._tiles_p), tensors, constants)

    def gradients_of_features(
        self, C: Tensor, B: Tensor, V: Tensor, tangents: tuple[Tensor | None, ...], grad_C: Tensor, grad_B: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Fill those of C and B; returns those of log_decay and weight."""
        constants, grid = self._sizes | self._products | self._normalize | self._resets, self._of_chunks(self._tiles_n)
        if self._by_state:
            grad_log = like(C)
            tensors = (C, B, V, self._log_decay, self._boundaries, *tangents, grad_C, grad_B, grad_log)
            self._launch(kernels.gradients_of_features_by_state, grid, tensors, constants)
            return grad_log, None
        of_tokens = (self._log_decay, self._log_decay, self._weight)
        layers = [None if x is None else x.new_empty(self._tiles_n, *x.shape, dtype=torch.float32) for x in of_tokens]
        tensors = (C, B, V, self._log_decay, self._weight, self._boundaries, *tangents, grad_C, grad_B, *layers)
        self._launch(kernels.gradients_of_features, grid, tensors, constants | self._kind)
        grad_log, grad_log_next, grad_weight = (None if x is None else x.sum(0) for x in layers)
        if grad_log is not None:
            starts = torch.arange(self._seq_len, device=C.device) % self._tile.tokens == 0
            grad_log += grad_log_next.roll(1, dims=1).masked_fill_(starts[:, None], 0.0)
        return grad_log, grad_weight

    def gradients_of_values(self, C: Tensor, B: Tensor, pairs: Tensor | None, slope: Tensor, adjoints: Tensor, grad_V: Tensor) -> None:
        """Fill that of V."""
        tensors = (C, B, self._log_decay, self._weight, self._boundaries, pairs, slope, adjoints, grad_V)
        constants = self._sizes | self._products | self._kind | self._resets
        self._launch(kernels.gradients_of_values, self._of_chunks(self._tiles_p), tensors, constants)

    def _of_chunks(self, tiles: int) -> tuple[int, int, int]:
        """The grid of kernels that work on all chunks at once."""
        return self._chunks, self._batch * self._heads, tiles

    def _launch(self, kernel, grid: tuple[int, ...], tensors: tuple[Tensor | None, ...], constants: dict) -> None:
        with on_device_of(tensors[0]):
            kernel[grid](*tensors, self._seq_len, self._heads, **constants, num_warps=self._tile.warps, num_stages=self._tile.stages)
