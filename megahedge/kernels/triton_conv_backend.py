"""Causal convolution on a GPU by Triton kernels, for where causal-conv1d is missing or refuses.  Triton is optional."""

import functools

import torch
from torch import Tensor

from megahedge.kernels import torch_conv, triton_loading
from megahedge.kernels.conv_problem import ConvBackend, ConvInputs, ConvProblem

_MODULE = "triton_conv"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST_TAPS = 8
"""Every tap is a piece of the kernels' code."""


def supports(problem: ConvProblem) -> str | None:
    """A Triton that does not import counts as missing."""
    reason = triton_loading.refusal(problem.device, _MODULE)
    if reason is not None:
        return reason
    if problem.dtype not in _DTYPES:
        return "it takes fp32, fp16 and bf16"
    if problem.num_taps > _MOST_TAPS:
        return f"it takes at most {_MOST_TAPS} taps"
    return _fault() if problem.device == "cuda" else None


def run(inputs: ConvInputs) -> Tensor:
    """y [b, t, d]"""
    return triton_loading.load(_MODULE).run(inputs)


@functools.cache
def _fault() -> str | None:
    """Why the kernels are not to be trusted on this GPU, found out once in a process."""
    return triton_loading.fault_of(lambda: find_fault(run, "cuda"))


def find_fault(run_conv, device: str) -> str | None:
    """What is wrong with a convolution and its gradients; None where nothing is."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 70, 24), "weight": (24, 4), "bias": (24,), "initial": (2, 3, 24)}
    documents = (torch.rand(2, 73, generator=generator) < 0.1).cumsum(1).to(device)
    problem = ConvProblem(4, 24, device, torch.float32, boundaries=True, initial=True)
    with torch.inference_mode(False), torch.enable_grad():
        tensors = {name: torch.randn(shape, generator=generator).to(device).requires_grad_() for name, shape in shapes.items()}
        inputs = ConvInputs(problem, **tensors, documents=documents)
        expected, found = (_results(each(inputs), tensors) for each in (torch_conv.run, run_conv))
    for name, x in expected.items():
        error = float((found[name] - x).norm() / x.norm())
        if not error <= 1e-5:  # some ten times what other orders of the same sums do
            return f"on this GPU its {name} is off by {error:.1e} of itself from what the backend torch computes"
    return None


def _results(y: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(y.square().sum(), list(tensors.values()))
    return {"output": y.detach()} | {f"gradient of {name}": x for name, x in zip(tensors, gradients, strict=True)}


BACKEND = ConvBackend("triton", supports, run)
