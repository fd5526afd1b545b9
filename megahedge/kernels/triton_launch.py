"""What launching Triton kernels takes, whichever they are."""

import contextlib

import torch
from torch import Tensor


def like(x: Tensor) -> Tensor:
    """Room for what is shaped like x, contiguous, in fp32."""
    return torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)


def part_of(x: Tensor | None, part: slice) -> Tensor | None:
    """Some sequences of a tensor that may be missing."""
    return None if x is None else x[part]


def parts_of(part: slice, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same of several."""
    return tuple(part_of(x, part) for x in tensors)


def layers_of(whole: Tensor | None, part: slice, count: int) -> Tensor | None:
    """Room for `count` addends of a part of a result; for one it is the place of the result itself."""
    if whole is None:
        return None
    place = whole[part]
    return place.unsqueeze(0) if count == 1 else place.new_empty(count, *place.shape)


def put_sum(layers: Tensor | None, whole: Tensor | None, part: slice) -> None:
    """Put a result in its place."""
    if layers is not None and len(layers) > 1:
        torch.sum(layers, dim=0, out=whole[part])


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton starts kernels on the current device, which may be another."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def capability_of(x: Tensor) -> int:
    """Of the GPU that a tensor is on, such as 90; where there is none, kernels are made as for that."""
    major, minor = torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0)
    return 10 * major + minor
