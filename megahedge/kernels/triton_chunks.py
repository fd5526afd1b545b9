"""Launching the kernels for decays that the channels of V share (triton_chunk_kernels.py)."""

# b batch, t seq_len, h num_local_heads, n state_size, p columns of V, c chunks

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megahedge.kernels import triton_chunk_kernels as kernels
from megahedge.kernels.normaliser import divisor_of, normalise
from megahedge.kernels.problem import ScanInputs, ScanOutputs
from megahedge.kernels.tiles import ChunkTile, chunk_tile, state_chunk_tile
from megahedge.kernels.triton_launch import capability_of, like, on_device_of, parts_of

_LOG2_E = 1 / math.log(2)
_PRODUCTS = {torch.bfloat16: (tl.bfloat16, "ieee"), torch.float16: (tl.float32, "tf32"), torch.float32: (tl.float32, "tf32x3")}
"""Operands of matrix products by the dtype of V, and how fp32 is multiplied.  V of 16 bits is multiplied in as many, but states outgrow
fp16, whose precision TF32 has.  Else three products of upper and lower halves keep the digits of fp32.  All sums are fp32."""
_CACHED_BYTES = 32 << 20
"""Of states that are written by one kernel and read by the next, of the 40 to 50 MB of a large GPU's L2 cache."""
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
    """The fields of _Inputs, and eps.

    Returns y [b, t, h, p], divided by the denominators where there is z, these [b, t, h], and the last h and z; without z neither
    denominators, which have no gradient of their own, nor z.
    """

    @staticmethod
    def forward(ctx, *tensors_and_eps):
        *tensors, ctx.eps = tensors_and_eps
        inputs = _Inputs(*(x if x is None else x.contiguous() for x in tensors))
        y, denominator, last_h, last_z = chunk_forward(inputs, ctx.eps)
        ctx.save_for_backward(*inputs, *((None, None) if denominator is None else (y, denominator)))
        if denominator is None:
            return y, last_h
        ctx.mark_non_differentiable(denominator)
        return y, denominator, last_h, last_z

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, *others):
        *tensors, y, denominator = ctx.saved_tensors
        adjoints = (others[0], None) if y is None else others[1:]
        return *chunk_backward(_Inputs(*tensors), y, denominator, grad_y, *adjoints, ctx.eps), None, None


class _Inputs(NamedTuple):
    """Of a scan, contiguous; None for no decay, a weight of 1, no denominator, one document."""

    C: Tensor
    """[b, t, h, n]"""
    B: Tensor
    """[b, t, h, n]"""
    V: Tensor
    """[b, t, h, p]"""
    log_decay: Tensor | None
    """To base 2: [b, t, h], or [b, t, h, n] for a decay by state."""
    weight: Tensor | None
    """[b, t, h]; none where the decay is by state."""
    h: Tensor
    """[b, h, n, p]"""
    z: Tensor | None
    """[b, h, n]"""
    boundaries: Tensor | None
    """[b, t]"""

    def sequences(self, part: slice) -> "_Inputs":
        """Some of them."""
        return _Inputs(*parts_of(part, *self))


def chunk_forward(inputs: _Inputs, eps: float) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """y, denominator and the last h and z: see _ChunkScan."""
    V, h, z = inputs.V, inputs.h, inputs.z
    y, denominator = torch.empty_like(V), None if z is None else V.new_empty(V.shape[:3], dtype=torch.float32)
    last_h, last_z = like(h), None if z is None else like(z)
    for part in _slices(inputs):
        launch = _ChunkLaunch(inputs.sequences(part))
        states = launch.states(*parts_of(part, last_h, last_z))
        launch.outputs(states, *parts_of(part, y, denominator), eps)
    return y, denominator, last_h, last_z


def chunk_backward(inputs: _Inputs, y, denominator, grad_y, grad_h, grad_z, eps: float) -> tuple[Tensor | None, ...]:
    """Gradients of C, B, V, log_decay, weight, h and z; y and denominator as chunk_forward has returned them."""
    slope, grad_h, grad_z = (x if x is None else x.contiguous() for x in (grad_y, grad_h, grad_z))
    divisor = slope_z = None
    if denominator is not None:
        divisor, small = divisor_of(denominator, eps)
        slope_z = ((slope * y).sum(dim=-1, dtype=torch.float32) / divisor).neg_().masked_fill_(small, 0.0)
    gradients = [torch.empty_like(x) for x in inputs[:3]] + [None if x is None else like(x) for x in inputs[3:-1]]
    last_h, last_z = like(inputs.h), None if inputs.z is None else like(inputs.z)  # of no use here
    for part in _slices(inputs):
        launch = _ChunkLaunch(inputs.sequences(part))
        grad_C, grad_B, grad_V, grad_log, grad_weight, first_h, first_z = parts_of(part, *gradients)
        states = launch.states(*parts_of(part, last_h, last_z))
        slopes = parts_of(part, divisor, slope, slope_z)
        adjoints = launch.adjoints(slopes, *parts_of(part, grad_h, grad_z), first_h, first_z)
        launch.gradients_of_features(states, slopes, adjoints, grad_C, grad_B, grad_log, grad_weight)
        launch.gradients_of_values(slopes, adjoints, grad_V)
    return tuple(gradients)


_States = tuple[Tensor, Tensor | None]
"""h and z before each chunk, or their adjoints after each: [b, h, c, n, p] and [b, h, c, n]."""


def _slices(inputs: _Inputs) -> Iterator[slice]:
    """The sequences of each launch: as many as leave the states of all their chunks in the cache, where the next kernel finds them."""
    batch, seq_len = inputs.C.shape[:2]
    tile, dtype = _tile(inputs), _DTYPES[_PRODUCTS[inputs.V.dtype][0]]
    bytes_each = -(-seq_len // tile.tokens) * inputs.h[0].numel() * dtype.itemsize
    at_once = max(1, _CACHED_BYTES // bytes_each)
    return (slice(first, min(first + at_once, batch)) for first in range(0, batch, at_once))


def _tile(inputs: _Inputs) -> ChunkTile:
    by_state = inputs.log_decay is not None and inputs.log_decay.dim() == 4
    return (state_chunk_tile if by_state else chunk_tile)(inputs.C.shape[-1], inputs.V.shape[-1], inputs.V.dtype, capability_of(inputs.C))


class _ChunkLaunch:
    """Starts the kernels of triton_chunk_kernels.py on some sequences."""

    def __init__(self, inputs: _Inputs):
        self._inputs = inputs
        self._batch, self._seq_len, self._heads, state_size = inputs.C.shape
        head_dim = inputs.V.shape[-1]
        self._tile = tile = _tile(inputs)
        self._tiles_p, self._tiles_n = -(-head_dim // tile.channels), -(-state_size // tile.states)
        self._chunks = -(-self._seq_len // tile.tokens)
        dot, precision = _PRODUCTS[inputs.V.dtype]
        self._states_dtype = _DTYPES[dot]
        self._sizes = {"N": state_size, "P": head_dim, "T": tile.tokens, "BLOCK_N": tile.states, "BLOCK_P": tile.channels}
        self._products = {"DOT": dot, "PRECISION": precision}
        self._kind = {"DECAYS": kernels.NO_DECAY, "WEIGHTED": inputs.weight is not None}
        if inputs.log_decay is not None:
            self._kind["DECAYS"] = kernels.BY_STATE if inputs.log_decay.dim() == 4 else kernels.BY_HEAD
        self._normalize, self._resets = {"NORMALIZE": inputs.z is not None}, {"HAS_RESETS": inputs.boundaries is not None}

    def states(self, last_h: Tensor, last_z: Tensor | None) -> _States:
        """Those before each chunk; fills the last."""
        inputs = self._inputs
        return self._walk((inputs.B, inputs.V), (None, None), (inputs.h, inputs.z), (last_h, last_z), reverse=False)

    def adjoints(self, slopes, grad_h: Tensor, grad_z: Tensor | None, first_h: Tensor, first_z: Tensor | None) -> _States:
        """Those after each chunk; fills those of the first state."""
        divisor, slope, slope_z = slopes
        return self._walk((self._inputs.C, slope), (divisor, slope_z), (grad_h, grad_z), (first_h, first_z), reverse=True)

    def _walk(self, keys_and_values, slopes, begin: _States, end: _States, *, reverse: bool) -> _States:
        inputs, lead = self._inputs, (self._batch, self._heads, self._chunks)
        h, z = begin
        states = h.new_empty(*lead, *h.shape[2:], dtype=self._states_dtype)
        states_z = None if z is None else z.new_empty(*lead, z.shape[-1], dtype=torch.float32)
        tensors = (*keys_and_values, inputs.log_decay, inputs.weight, inputs.boundaries, *slopes, h, z, states, states_z, *end)
        constants = self._sizes | self._products | self._kind | self._normalize | self._resets | {"REVERSE": reverse}
        self._launch(kernels.walk, (self._batch * self._heads, self._tiles_p, self._tiles_n), tensors, constants)
        return states, states_z

    @functools.cached_property
    def _pairs(self) -> Tensor | None:
        """Weights of pairs of tokens, [b, t, h, T]; None where other kernels find them by matrix products."""
        if self._kind["DECAYS"] != kernels.BY_STATE:
            return None
        C, B, _, log_decay, *_, boundaries = self._inputs
        pairs = C.new_empty(*C.shape[:3], self._tile.tokens, dtype=torch.float32)
        constants = {name: self._sizes[name] for name in ("N", "T", "BLOCK_N")} | self._resets
        self._launch(kernels.pairs_by_state, self._of_chunks(1), (C, B, log_decay, boundaries, pairs), constants)
        return pairs

    def outputs(self, states: _States, y: Tensor, denominator: Tensor | None, eps: float) -> None:
        """Fill y and denominator."""
        inputs = self._inputs
        tensors = (*inputs[:5], inputs.boundaries, self._pairs, *states, y, denominator, eps)
        constants = self._sizes | self._products | self._kind | self._normalize | self._resets
        self._launch(kernels.outputs, self._of_chunks(self._tiles_p), tensors, constants)

    def gradients_of_features(self, states: _States, slopes, adjoints: _States, grad_C, grad_B, grad_log, grad_weight) -> None:
        """Fill the gradients of C, B, log_decay and weight."""
        inputs = self._inputs
        states_of_tile = self._tile.states_of_features
        tiles = -(-self._sizes["N"] // states_of_tile)
        constants = self._sizes | self._products | self._normalize | self._resets | {"BLOCK_N": states_of_tile}
        grid, tangents = self._of_chunks(tiles), (*states, *slopes, *adjoints)
        if self._kind["DECAYS"] == kernels.BY_STATE:
            tensors = (*inputs[:4], inputs.boundaries, *tangents, grad_C, grad_B, grad_log)
            self._launch(kernels.gradients_of_features_by_state, grid, tensors, constants)
            return
        of_tokens = (inputs.log_decay, inputs.log_decay, inputs.weight)
        layers = [None if x is None else x.new_empty(tiles, *x.shape, dtype=torch.float32) for x in of_tokens]
        self._launch(
            kernels.gradients_of_features,
            grid,
            (*inputs[:5], inputs.boundaries, *tangents, grad_C, grad_B, *layers),
            constants | self._kind,
        )
        here, following, weights = layers
        if here is not None:
            first_of_chunk = torch.arange(self._seq_len, device=here.device) % self._tile.tokens == 0
            torch.sum(here, dim=0, out=grad_log)
            grad_log += following.sum(0).roll(1, dims=1).masked_fill_(first_of_chunk[:, None], 0.0)
        if weights is not None:
            torch.sum(weights, dim=0, out=grad_weight)

    def gradients_of_values(self, slopes, adjoints: _States, grad_V: Tensor) -> None:
        """Fill that of V."""
        C, B, _, log_decay, weight, *_, boundaries = self._inputs
        divisor, slope, _ = slopes
        tensors = (C, B, log_decay, weight, boundaries, self._pairs, divisor, slope, adjoints[0], grad_V)
        constants = self._sizes | self._products | self._kind | self._normalize | self._resets
        self._launch(kernels.gradients_of_values, self._of_chunks(self._tiles_p), tensors, constants)

    def _of_chunks(self, tiles: int) -> tuple[int, int]:
        """The grid of kernels that work on all chunks at once."""
        return self._batch * self._heads * self._chunks, tiles

    def _launch(self, kernel, grid: tuple[int, ...], tensors: tuple[Tensor | float | None, ...], constants: dict) -> None:
        with on_device_of(tensors[0]):
            kernel[grid](*tensors, self._seq_len, self._heads, **constants, num_warps=self._tile.warps, num_stages=self._tile.stages)
