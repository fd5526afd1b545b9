"""The softmax of Hedgehog's feature maps, over a vector and its negative."""

import functools
import logging

import torch
from torch import Tensor

from megahedge.kernels import triton_loading
from megahedge.utils.logging import get_logger, log_once_a_node

_MODULE = "triton_features"
_WIDEST = 4096
"""Numbers that a row of the Triton kernels may have: a program holds whole rows."""


def signed_softmax(x: Tensor, *, stored: torch.dtype = torch.float32) -> Tensor:
    """softmax([x, -x]) along the last axis (Attention to Mamba, equation 6): x [..., m] → [..., 2 m].

    Computed in fp32 at least, and returned so.  Only where stored is bf16 and the kernels of a GPU make them are they rounded to that, for
    features that go straight into a scan, whose matrix products round them in any case.  (fp16 would lose small ones.)
    Raises ValueError for an x without an axis.
    """
    if x.dim() == 0:
        raise ValueError("x is [..., m], and not one number")
    if x.dtype == torch.float32 and x.numel() and not torch.compiler.is_compiling() and _kernels_run(x.device.type, x.shape[-1]):
        return triton_loading.load(_MODULE).run(x, torch.bfloat16 if stored == torch.bfloat16 else torch.float32)
    return _by_torch(x)


def _by_torch(x: Tensor) -> Tensor:
    return torch.cat((x, -x), dim=-1).softmax(-1)


def _kernels_run(device: str, width: int) -> bool:
    return width <= _WIDEST and triton_loading.refusal(device, _MODULE) is None and (device != "cuda" or _fault() is None)


@functools.cache
def _fault() -> str | None:
    """Why the kernels are not to be trusted on this GPU, found out once in a process, and told."""
    fault = triton_loading.fault_of(lambda: find_fault("cuda"))
    if fault is not None:
        log_once_a_node(get_logger("kernels"), logging.WARNING, f"Triton's kernels of the feature maps are left out: {fault}")
    return fault


def find_fault(device: str) -> str | None:
    """What is wrong with features that Triton's kernels make, or with their gradients; None where nothing is."""
    generator = torch.Generator().manual_seed(0)
    slope = torch.rand(7, 5, 160, generator=generator).to(device)
    with torch.inference_mode(False), torch.enable_grad():
        x = (4 * torch.randn(7, 5, 80, generator=generator)).to(device).requires_grad_()
        results = []
        for y in (_by_torch(x), triton_loading.load(_MODULE).run(x, torch.float32)):
            results.append((y.detach(), *torch.autograd.grad(y, x, slope)))
    for name, expected, found in zip(("output", "gradient"), *results, strict=True):
        error = float((found - expected).norm() / expected.norm())
        if not error <= 1e-5:  # some ten times what other orders of the same sums do
            return f"on this GPU its {name} of the feature map's softmax is off by {error:.1e} of itself"
    return None
