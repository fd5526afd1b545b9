"""Depthwise causal convolution over the sequence, the short memory in front of the scan."""

# b batch, t seq_len, d channels, k conv_kernel (number of taps)

import torch
from torch import Tensor


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial: Tensor | None = None,
    boundaries: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y_t = bias + sum_i weight[:, i] * x_{t - (k - 1) + i}: a filter of k taps for each channel, the last tap on the current token.

    x [b, t, d];  weight [d, k];  bias [d] or None;  initial [b, k - 1, d]: the inputs before the first, zeros by default.
    boundaries [b, t] bool: True where a new document begins; no tap reaches across it.
    Computed tap by tap in x.dtype: for a few taps as fast as a grouped convolution, and the identity filter (0, ..., 0, 1) without
    bias gives back x bit for bit, as long as x is finite.
    Returns y [b, t, d] in x.dtype and the last k - 1 inputs [b, k - 1, d], the `initial` of the tokens that follow.  After a boundary
    among these, the inputs before it are zeros.
    Raises ValueError if shapes do not fit.
    """
    batch, seq_len, channels = x.shape
    num_taps = weight.shape[-1]
    if weight.shape != (channels, num_taps) or num_taps == 0 or (bias is not None and bias.shape != (channels,)):
        raise ValueError(f"weight is [d, k] and bias [d] with d = {channels}, k > 0, not {list(weight.shape)}")
    if initial is None:
        initial = x.new_zeros(batch, num_taps - 1, channels)
    if initial.shape != (batch, num_taps - 1, channels):
        raise ValueError(f"initial is [b, k - 1, d] = {[batch, num_taps - 1, channels]}, not {list(initial.shape)}")
    padded = torch.cat((initial.to(x.dtype), x), dim=1)
    documents = None if boundaries is None else _document_numbers(boundaries, num_taps)

    y = None
    for tap in reversed(range(num_taps)):
        seen = padded[:, tap : tap + seq_len]
        if documents is not None and tap < num_taps - 1:
            seen = seen.masked_fill((documents[:, tap : tap + seq_len] != documents[:, num_taps - 1 :]).unsqueeze(-1), 0.0)
        term = seen * weight[:, tap].to(x.dtype)
        y = term if y is None else y + term
    if bias is not None:
        y = y + bias.to(x.dtype)
    last = padded[:, seq_len:].clone()  # a view would keep all inputs for as long as somebody remembers these
    if documents is not None:
        last = last.masked_fill((documents[:, seq_len:] != documents[:, -1:]).unsqueeze(-1), 0.0)
    return y, last


def _document_numbers(boundaries: Tensor, num_taps: int) -> Tensor:
    """[b, k - 1 + t]: number of document starts up to each input, those before the first token included."""
    count = boundaries.long().cumsum(dim=1)
    return torch.cat((count.new_zeros(count.shape[0], num_taps - 1), count), dim=1)
