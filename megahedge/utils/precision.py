"""Names of precisions, and arithmetic that must not be done in bf16, whatever the model's."""

import contextlib

import torch
from torch import Tensor

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the names that options have."""


def full_precision(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Within `with`, autocast leaves the precision of matmuls on the tensor's device alone."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else contextlib.nullcontext()


def widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each in fp32; fp64 stays."""
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)
