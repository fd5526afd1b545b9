"""What a scan is asked to do, in the one form that every backend reads."""

# b batch, t seq_len, h num_local_heads, n state_size, p head_dim

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ScanState:
    """The memory of all tokens so far, fp32 (fp64 where the scan was)."""

    numerator: Tensor
    """[b, h, n, p]"""
    denominator: Tensor | None
    """[b, h, n]; [b, h, n, p] where rate or step differ between channels; None without normalisation."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """The structure of a scan: all that a backend needs to know to accept it or to refuse."""

    structure: str
    """Shape of the rate: none, head, state or channel."""
    step_axis: str | None
    """Last axis of the step: shared (size 1), state or channel; None where every step is 1."""
    normalize: bool
    state_size: int
    head_dim: int
    device: str
    """Type of the device, such as cpu or cuda."""
    dtype: torch.dtype
    """Of the arithmetic: float32 or float64."""
    needs_grad: bool
    # Kernels of other projects start from nothing and go through to the end.  A backend can only refuse, and `auto` only go on to the
    # next, by what stands here: once a scan runs it is too late.
    boundaries: bool = False
    """Whether the state is reset on the way."""
    initial_state: bool = False
    """Whether something is remembered from before the first token."""

    @property
    def per_channel(self) -> bool:
        """Whether the denominator differs between the channels of V, because rate or step do."""
        return "channel" in (self.structure, self.step_axis)

    @property
    def decay_per_channel(self) -> bool:
        """Whether exp(-rate * step) differs between the channels of V."""
        return self.structure != "none" and self.per_channel

    def __str__(self) -> str:
        step = {None: "step 1", "shared": "step by head"}.get(self.step_axis, f"step by {self.step_axis}")
        rate = "no decay" if self.structure == "none" else f"decay by {self.structure}"
        return f"{rate}, {step}, {str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclasses.dataclass(frozen=True)
class ScanInputs:
    """The tensors of a scan in the dtype of the arithmetic; axes that an input lacks have size 1, so that all of them broadcast.

    For backends that take them so (`Backend.any_dtype`), C, B and V are in dtypes of their own.
    """

    problem: Problem
    C: Tensor
    """[b, t, h, n]"""
    B: Tensor
    """[b, t, h, n]"""
    V: Tensor
    """[b, t, h, p]"""
    step: Tensor
    """[b, t, h, 1 | n, 1 | p]; ones where the caller gave none."""
    rate: Tensor | None
    """[1 | h, 1 | n, 1 | p]"""
    numerator: Tensor
    """The state before the first token, [b, h, n, p]."""
    denominator: Tensor | None
    """The same of the denominator, [b, h, n, 1 | p]."""
    boundaries: Tensor | None
    """[b, t] bool: the state is reset before this token."""
    eps: float
    """For backends that normalise: see `normalise`."""

    def widened(self) -> "ScanInputs":
        """The same with C, B and V in the dtype of the arithmetic."""
        C, B, V = (x.to(self.problem.dtype) for x in (self.C, self.B, self.V))
        return dataclasses.replace(self, C=C, B=B, V=V)


ScanOutputs = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""C_t h_t [b, t, h, p] and C_t z_t [b, t, h, 1 | p], then the last state in the shapes of ScanInputs."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to run a scan."""

    name: str
    supports: Callable[[Problem], str | None]
    """None if it can run the problem, else the reason why not."""
    run: Callable[[ScanInputs], ScanOutputs]
    any_dtype: bool = False
    """Whether it takes C, B and V in 16 bits, and saves the copy."""
    normalises: bool = False
    """Whether the first of its outputs is divided by the second already, where there is one."""
