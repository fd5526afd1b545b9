"""A call of somebody else's kernel to see that it works at all."""

from collections.abc import Callable

import torch
from torch import Tensor


def try_once(function: Callable[..., Tensor], *arguments, **options) -> None:
    """Run it with these arguments, and back to those that are floating-point tensors.

    A wheel may import and yet lack a symbol, or code for this GPU, which shows at the first call: too late to take another backend.
    Raises whatever the function raises.
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaves = {index: x.detach().clone().requires_grad_() for index, x in enumerate(arguments) if isinstance(x, Tensor)}
        y = function(*(leaves.get(index, x) for index, x in enumerate(arguments)), **options)
        gradients = torch.autograd.grad(y.square().sum(), list(leaves.values()))
        float(gradients[0].sum())  # kernels report their errors when they are waited for
