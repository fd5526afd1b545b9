"""Depthwise causal convolution over the sequence, the short memory in front of the scan."""

# b batch, t seq_len, d channels, k conv_kernel (number of taps)

import torch
from torch import Tensor

from megahedge.kernels.conv_problem import ConvInputs, ConvProblem
from megahedge.kernels.conv_registry import choose_conv_backend


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial: Tensor | None = None,
    boundaries: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """y_t = bias + sum_i weight[:, i] * x_{t - (k - 1) + i}: a filter of k taps for each channel, the last tap on the current token.

    x [b, t, d];  weight [d, k];  bias [d] or None;  initial [b, k - 1, d]: the inputs before the first, zeros by default.
    boundaries [b, t] bool: True where a new document begins; no tap reaches across it.
    Whatever the backend, the identity filter (0, ..., 0, 1) without bias gives back x bit for bit, as long as x is finite
    (and, on a GPU, not below 1.2e-38 without being 0).
    Returns y [b, t, d] in x.dtype and the last k - 1 inputs [b, k - 1, d], the `initial` of the tokens that follow.  After a boundary
    among these, the inputs before it are zeros.
    Raises ValueError if shapes do not fit, or if the named backend cannot run this problem, with its reason.
    """
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(f"x is [b, t, d] floating-point, not {list(x.shape)} {x.dtype}")
    batch, _, channels = x.shape
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] == 0:
        raise ValueError(f"weight is [d, k] with d = {channels}, k > 0, not {list(weight.shape)}")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"bias is [d] with d = {channels}, not {list(bias.shape)}")
    num_taps = weight.shape[-1]
    if initial is not None and initial.shape != (batch, num_taps - 1, channels):
        raise ValueError(f"initial is [b, k - 1, d] = {[batch, num_taps - 1, channels]}, not {list(initial.shape)}")
    if boundaries is not None and (boundaries.shape != x.shape[:2] or boundaries.dtype != torch.bool):
        raise ValueError(f"boundaries is [b, t] = {list(x.shape[:2])} bool, not {list(boundaries.shape)} {boundaries.dtype}")
    problem = ConvProblem(num_taps, channels, x.device.type, x.dtype, boundaries is not None, initial is not None)
    inputs = ConvInputs(
        problem,
        x,
        weight.to(x.dtype),
        None if bias is None else bias.to(x.dtype),
        x.new_zeros(batch, num_taps - 1, channels) if initial is None else initial.to(x.dtype),
        None if boundaries is None else _document_numbers(boundaries, num_taps),
    )
    if backend == "auto" and torch.compiler.is_compiling():
        backend = "torch"  # the compiler makes one kernel of its taps, together with what comes before and after them
    return choose_conv_backend(backend, problem).run(inputs), _last_inputs(inputs)


def _document_numbers(boundaries: Tensor, num_taps: int) -> Tensor:
    """[b, k - 1 + t]: number of document starts up to each input, those before the first token included."""
    count = boundaries.long().cumsum(dim=1)
    return torch.cat((count.new_zeros(count.shape[0], num_taps - 1), count), dim=1)


def _last_inputs(inputs: ConvInputs) -> Tensor:
    """[b, k - 1, d]: those of the last document, zeros before it."""
    seq_len, num_last = inputs.x.shape[1], inputs.problem.num_taps - 1
    # A copy: a view would keep all inputs for as long as somebody remembers these.
    last = torch.cat((inputs.initial[:, seq_len:], inputs.x[:, max(0, seq_len - num_last) :]), dim=1)
    if inputs.documents is not None:
        last = last.masked_fill((inputs.documents[:, seq_len:] != inputs.documents[:, -1:]).unsqueeze(-1), 0.0)
    return last
