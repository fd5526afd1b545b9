"""The convolutions that an exported model carries along, in place of megahedge.kernels.conv_registry: that which needs torch alone."""

from megahedge.kernels.conv_problem import ConvBackend, ConvProblem
from megahedge.kernels.torch_conv import BACKEND as TORCH


def choose_conv_backend(name: str, problem: ConvProblem) -> ConvBackend:
    """The one backend.  Raises ValueError where another is asked for."""
    if name not in ("auto", TORCH.name):
        raise ValueError(f"no convolution backend '{name}' runs {problem}; use auto or {TORCH.name}")
    return TORCH
