"""Arithmetic that must not be done in bf16, whatever the model's precision."""

import contextlib

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Within `with`, autocast leaves the precision of matmuls on the tensor's device alone."""
    return torch.autocast(tensor.device.type, enabled=False)


def widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each in fp32; fp64 stays."""
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)
