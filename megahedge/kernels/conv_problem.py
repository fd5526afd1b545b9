"""What a causal convolution is asked to do, in the one form that every backend reads."""

# b batch, t seq_len, d channels, k conv_kernel (number of taps)

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ConvProblem:
    """All that a backend needs to know to accept a convolution or to refuse."""

    num_taps: int
    num_channels: int
    device: str
    """Type of the device, such as cpu or cuda."""
    dtype: torch.dtype
    boundaries: bool
    """Whether documents begin on the way, across whose starts no tap reaches."""
    initial: bool
    """Whether inputs before the first are given."""

    def __str__(self) -> str:
        return f"{self.num_taps} taps, {str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclasses.dataclass(frozen=True)
class ConvInputs:
    """The tensors of a convolution, all of one dtype."""

    problem: ConvProblem
    x: Tensor
    """[b, t, d]"""
    weight: Tensor
    """[d, k]"""
    bias: Tensor | None
    """[d]"""
    initial: Tensor
    """[b, k - 1, d]: the inputs before the first; zeros where the caller gave none."""
    documents: Tensor | None
    """[b, k - 1 + t]: number of document starts up to each input, those before the first included; None where there are none."""


@dataclasses.dataclass(frozen=True)
class ConvBackend:
    """One way to run a convolution."""

    name: str
    supports: Callable[[ConvProblem], str | None]
    """None if it can run the problem, else the reason why not."""
    run: Callable[[ConvInputs], Tensor]
    """y [b, t, d]"""
