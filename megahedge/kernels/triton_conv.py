"""The causal convolution by Triton kernels, forward and backward.

A program has a tile of some inputs by some channels.  Sums are fp32, the current token's tap first, and rounded once.  Of the gradients
of filter and bias each program has a share, kept in a workspace and added up afterwards, always in the same order.
"""

# b batch, t seq_len, d channels, k conv_kernel (number of taps), s padded inputs: the k - 1 before the first token, then all

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megahedge.kernels.conv_problem import ConvInputs
from megahedge.kernels.triton_launch import on_device_of

_TOKENS, _CHANNELS = 16, 64
"""Of a tile: 8 numbers a thread, of which as many rows as there are taps are read again from the nearest cache."""


@triton.jit
def _padded(X, INITIAL, batch, s, channel, seq_len, channels, inside, K: tl.constexpr):
    """A tile of padded inputs [s, d] in fp32, zeros outside."""
    before = (s < K - 1)[:, None]
    early = INITIAL + (batch * (K - 1) + s)[:, None] * channels + channel[None, :]
    late = X + (batch * seq_len + s - (K - 1))[:, None] * channels + channel[None, :]
    early_x = tl.load(early, mask=inside & before, other=0.0).to(tl.float32)
    return tl.where(before, early_x, tl.load(late, mask=inside & (before == 0), other=0.0).to(tl.float32))


@triton.jit
def _document(DOCUMENTS, batch, s, padded_len, inside):
    """Numbers of the documents of padded inputs."""
    return tl.load(DOCUMENTS + batch * padded_len + s, mask=inside, other=0)


@triton.jit
def conv_forward(
    X, WEIGHT, BIAS, INITIAL, DOCUMENTS, Y, seq_len, channels,
    K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """Y [b, t, d] of X [b, t, d], WEIGHT [d, k], BIAS [d], INITIAL [b, k - 1, d], DOCUMENTS [b, s].

    The grid is (b tiles, tiles along d).
    """
    tiles = tl.cdiv(seq_len, TOKENS)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    t = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    in_t, in_d = t < seq_len, channel < channels
    inside, padded_len = in_t[:, None] & in_d[None, :], seq_len + K - 1
    y = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for back in tl.static_range(K):
        tap = K - 1 - back
        x = _padded(X, INITIAL, batch, t + tap, channel, seq_len, channels, inside, K)
        if HAS_RESETS and back > 0:
            own = _document(DOCUMENTS, batch, t + K - 1, padded_len, in_t)
            x = tl.where((_document(DOCUMENTS, batch, t + tap, padded_len, in_t) == own)[:, None], x, 0.0)
        y += x * tl.load(WEIGHT + channel * K + tap, mask=in_d, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(BIAS + channel, mask=in_d, other=0.0).to(tl.float32)[None, :]
    tl.store(Y + (batch * seq_len + t)[:, None] * channels + channel[None, :], y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def conv_backward(
    X, WEIGHT, INITIAL, DOCUMENTS, SLOPE, GRAD, SHARES, seq_len, channels,
    K: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """GRAD [b, s, d] of the padded inputs, and SHARES [b tiles, k + 1, d] in the gradients of filter and bias, from SLOPE [b, t, d].

    The grid is (b tiles, tiles along d), where tiles go along s.
    """
    padded_len = seq_len + K - 1
    tiles = tl.cdiv(padded_len, TOKENS)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    s = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    in_s, in_d = s < padded_len, channel < channels
    inside = in_s[:, None] & in_d[None, :]
    x = _padded(X, INITIAL, batch, s, channel, seq_len, channels, inside, K)
    grad = tl.zeros([TOKENS, CHANNELS], tl.float32)
    share = SHARES + tl.program_id(0).to(tl.int64) * (K + 1) * channels + channel
    for tap in tl.static_range(K):
        t = s - tap  # the token that reads this input by this tap
        in_t = in_s & (t >= 0) & (t < seq_len)
        slope = tl.load(
            SLOPE + (batch * seq_len + t)[:, None] * channels + channel[None, :], mask=in_t[:, None] & in_d[None, :], other=0.0
        ).to(tl.float32)
        if tap == K - 1:
            tl.store(share + K * channels, tl.sum(slope, 0), mask=in_d)
        if HAS_RESETS and tap < K - 1:
            own = _document(DOCUMENTS, batch, t + K - 1, padded_len, in_t)
            slope = tl.where((_document(DOCUMENTS, batch, s, padded_len, in_s) == own)[:, None], slope, 0.0)
        tl.store(share + tap * channels, tl.sum(slope * x, 0), mask=in_d)
        grad += slope * tl.load(WEIGHT + channel * K + tap, mask=in_d, other=0.0).to(tl.float32)[None, :]
    tl.store(GRAD + (batch * padded_len + s)[:, None] * channels + channel[None, :], grad.to(GRAD.dtype.element_ty), mask=inside)


class _Conv(torch.autograd.Function):
    """The tensors of ConvInputs, contiguous."""

    @staticmethod
    def forward(ctx, x, weight, bias, initial, documents):
        ctx.save_for_backward(x, weight, initial, documents)
        ctx.has_bias = bias is not None
        y = torch.empty_like(x)
        constants = {"K": weight.shape[1], "HAS_BIAS": bias is not None, "HAS_RESETS": documents is not None}
        _launch(conv_forward, x, x.shape[1], (x, weight, bias, initial, documents, y), constants)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, slope):
        x, weight, initial, documents = ctx.saved_tensors
        (batch, seq_len, channels), taps = x.shape, weight.shape[1]
        padded_len = seq_len + taps - 1
        grad = x.new_empty(batch, padded_len, channels)
        shares = x.new_empty(batch * -(-padded_len // _TOKENS), taps + 1, channels, dtype=torch.float32)
        constants = {"K": taps, "HAS_RESETS": documents is not None}
        _launch(conv_backward, x, padded_len, (x, weight, initial, documents, slope.contiguous(), grad, shares), constants)
        of_filter = shares.sum(0)
        grad_bias = of_filter[taps].to(x.dtype) if ctx.has_bias else None
        return grad[:, taps - 1 :], of_filter[:taps].t().to(x.dtype), grad_bias, grad[:, : taps - 1], None


def run(inputs: ConvInputs) -> Tensor:
    """y [b, t, d] in x.dtype."""
    tensors = (inputs.x, inputs.weight, inputs.bias, inputs.initial, inputs.documents)
    return _Conv.apply(*(x if x is None else x.contiguous() for x in tensors))


def _launch(kernel, x: Tensor, tokens: int, tensors: tuple[Tensor | None, ...], constants: dict) -> None:
    batch, seq_len, channels = x.shape
    grid = (batch * -(-tokens // _TOKENS), -(-channels // _CHANNELS))
    with on_device_of(x):
        kernel[grid](*tensors, seq_len, channels, TOKENS=_TOKENS, CHANNELS=_CHANNELS, **constants, num_warps=4)
