"""Launching the kernels for decays that the channels of V share (triton_chunk_kernels.py)."""

# b batch, t seq_len, h num_local_heads, n state_size, p columns of V, c chunks

import math

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megahedge.kernels import triton_chunk_kernels as kernels
from megahedge.kernels.normaliser import divisor_of, normalise
from megahedge.kernels.problem import ScanInputs, ScanOutputs
from megahedge.kernels.tiles import chunk_tile, state_chunk_tile
from megahedge.kernels.triton_launch import like, on_device_of

_LOG2_E = 1 / math.log(2)
_PRODUCTS = {torch.bfloat16: (tl.bfloat16, "ieee"), torch.float16: (tl.float32, "tf32"), torch.float32: (tl.float32, "tf32x3")}
"""Operands of matrix products by the dtype of V, and how fp32 is multiplied.  V of 16 bits is multiplied in as many, but states outgrow
fp16, whose precision TF32 has.  Else three products of upper and lower halves keep the digits of fp32.  All sums are fp32."""
_DTYPES = {tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}


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
    outputs = _ChunkScan.apply(inputs.C, B, V, log_decay, weight, inputs.numerator, z, inputs.boundaries, inputs.eps)
    if z is None:
        return outputs[0], None, outputs[1], None
    y, denominator, h, z = outputs
    return y, denominator.unsqueeze(-1), h, z.unsqueeze(-1)


def _by_channel(inputs: ScanInputs) -> ScanOutputs:
    """Without decay but with a step by channel, the denominator differs between channels: it is as many columns more."""
    step, widths = inputs.step.squeeze(-2), (inputs.V.shape[-1],) * 2
    columns, state = inputs.V * step, inputs.numerator
    if inputs.denominator is not None:
        columns, state = torch.cat((columns, step), dim=-1), torch.cat((state, inputs.denominator), dim=-1)
    outputs, state = _ChunkScan.apply(inputs.C, inputs.B, columns, None, None, state, None, inputs.boundaries, inputs.eps)
    if inputs.denominator is None:
        return outputs, None, state, None
    numerator, denominator, h, z = (part.contiguous() for x in (outputs, state) for part in x.split(widths, dim=-1))
    return normalise(numerator, denominator, inputs.eps), denominator, h, z


class _ChunkScan(torch.autograd.Function):
    """C, B [b, t, h, n], V [b, t, h, p], log_decay (to base 2) [b, t, h] or [b, t, h, n], weight [b, t, h],
    h [b, h, n, p], z [b, h, n], boundaries [b, t]; None for no decay, a weight of 1, no denominator, one document.  By state there is no
    weight.

    Returns y [b, t, h, p], divided by the denominators where there is z, these [b, t, h], and the last h and z; without z neither
    denominators, which have no gradient of their own, nor z.
    """

    @staticmethod
    def forward(ctx, C, B, V, log_decay, weight, h, z, boundaries, eps):
        tensors = [x if x is None else x.contiguous() for x in (C, B, V, log_decay, weight, h, z, boundaries)]
        y, denominator, *state = chunk_forward(*tensors, eps)
        ctx.save_for_backward(*tensors, *((None, None) if z is None else (y, denominator)))
        ctx.eps = eps
        if z is None:
            return y, state[0]
        ctx.mark_non_differentiable(denominator)
        return y, denominator, *state

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, *others):
        *tensors, y, denominator = ctx.saved_tensors
        adjoints = (others[0], None) if y is None else others[1:]
        return *chunk_backward(*tensors, y, denominator, grad_y, *adjoints, ctx.eps), None, None


def chunk_forward(C, B, V, log_decay, weight, h, z, boundaries, eps: float) -> tuple[Tensor | None, ...]:
    """y, denominator and the last h and z: see _ChunkScan.  All inputs are contiguous."""
    launch = _ChunkLaunch(C, V, log_decay, weight, boundaries, z is not None)
    states, states_z, last_h, last_z = launch.walk(B, V, h, z)
    y, denominator = torch.empty_like(V), None if z is None else V.new_empty(V.shape[:3], dtype=torch.float32)
    launch.outputs(C, B, V, launch.pairs(C, B), states, states_z, y, denominator, eps)
    return y, denominator, last_h, last_z


def chunk_backward(
    C, B, V, log_decay, weight, h, z, boundaries, y, denominator, grad_y, grad_h, grad_z, eps: float
) -> tuple[Tensor | None, ...]:
    """Gradients of C, B, V, log_decay, weight, h and z; y and denominator as chunk_forward has returned them."""
    launch = _ChunkLaunch(C, V, log_decay, weight, boundaries, z is not None)
    slope, grad_h, grad_z = (x if x is None else x.contiguous() for x in (grad_y, grad_h, grad_z))
    divisor = slope_z = None
    if z is not None:
        divisor, small = divisor_of(denominator, eps)
        slope_z = ((slope * y).sum(dim=-1, dtype=torch.float32) / divisor).neg_().masked_fill_(small, 0.0)
    states, states_z, _, _ = launch.walk(B, V, h, z)
    adjoints, adjoints_z, grad_h, grad_z = launch.walk(C, slope, grad_h, grad_z, divisor, slope_z, reverse=True)
    grad_C, grad_B, grad_V = like(C), like(B), like(V)
    tangents = (states, states_z, divisor, slope, slope_z, adjoints, adjoints_z)
    grad_log, grad_weight = launch.gradients_of_features(C, B, V, tangents, grad_C, grad_B)
    launch.gradients_of_values(C, B, launch.pairs(C, B), divisor, slope, adjoints, grad_V)
    return grad_C, grad_B, grad_V, grad_log, grad_weight, grad_h, grad_z


class _ChunkLaunch:
    """Starts the kernels of triton_chunk_kernels.py."""

    def __init__(self, C: Tensor, V: Tensor, log_decay: Tensor | None, weight: Tensor | None, boundaries: Tensor | None, normalize: bool):
        self._batch, self._seq_len, self._heads, state_size = C.shape
        head_dim = V.shape[-1]
        self._log_decay, self._weight, self._boundaries = log_decay, weight, boundaries
        self._by_state = log_decay is not None and log_decay.dim() == 4
        self._tile = tile = (state_chunk_tile if self._by_state else chunk_tile)(state_size, head_dim, V.dtype)
        self._tiles_p, self._tiles_n = -(-head_dim // tile.channels), -(-state_size // tile.states)
        self._chunks = -(-self._seq_len // tile.tokens)
        dot, precision = _PRODUCTS[V.dtype]
        self._states_dtype = _DTYPES[dot]
        self._sizes = {"N": state_size, "P": head_dim, "T": tile.tokens, "BLOCK_N": tile.states, "BLOCK_P": tile.channels}
        self._products = {"DOT": dot, "PRECISION": precision}
        decays = kernels.BY_STATE if self._by_state else kernels.NO_DECAY if log_decay is None else kernels.BY_HEAD
        self._kind = {"DECAYS": decays, "WEIGHTED": weight is not None}
        self._normalize, self._resets = {"NORMALIZE": normalize}, {"HAS_RESETS": boundaries is not None}

    def walk(
        self,
        keys: Tensor,
        values: Tensor,
        h: Tensor,
        z: Tensor | None,
        divisor: Tensor | None = None,
        slope_z: Tensor | None = None,
        *,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """The states before each chunk and the last one, or with `reverse` the adjoints after each and the first: h and z of all, h, z."""
        lead = (self._batch, self._heads, self._chunks)
        states, last = h.new_empty(*lead, *h.shape[2:], dtype=self._states_dtype), like(h)
        states_z, last_z = (None, None) if z is None else (z.new_empty(*lead, z.shape[-1], dtype=torch.float32), like(z))
        tensors = (keys, values, self._log_decay, self._weight, self._boundaries, divisor, slope_z, h, z, states, states_z, last, last_z)
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

    def outputs(self, C: Tensor, B: Tensor, V: Tensor, pairs: Tensor | None, states, states_z, y, denominator, eps: float) -> None:
        """Fill y and denominator."""
        tensors = (C, B, V, self._log_decay, self._weight, self._boundaries, pairs, states, states_z, y, denominator, eps)
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

    def gradients_of_values(self, C: Tensor, B: Tensor, pairs: Tensor | None, *tangents_and_gradient: Tensor | None) -> None:
        """Fill that of V; before it come divisor, slope and adjoints."""
        tensors = (C, B, self._log_decay, self._weight, self._boundaries, pairs, *tangents_and_gradient)
        constants = self._sizes | self._products | self._kind | self._normalize | self._resets
        self._launch(kernels.gradients_of_values, self._of_chunks(self._tiles_p), tensors, constants)

    def _of_chunks(self, tiles: int) -> tuple[int, int, int]:
        """The grid of kernels that work on all chunks at once."""
        return self._chunks, self._batch * self._heads, tiles

    def _launch(self, kernel, grid: tuple[int, ...], tensors: tuple[Tensor | float | None, ...], constants: dict) -> None:
        with on_device_of(tensors[0]):
            kernel[grid](*tensors, self._seq_len, self._heads, **constants, num_warps=self._tile.warps, num_stages=self._tile.stages)
