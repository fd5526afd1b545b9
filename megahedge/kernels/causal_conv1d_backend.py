"""Causal convolution on a GPU by the kernels of causal-conv1d, which is optional.

They convert x and the filter to fp32, add up in fp32 from the bias on, and round once, when y is stored (csrc/causal_conv1d_fwd.cu).
So the identity filter (0, ..., 0, 1) without bias gives back x bit for bit, as long as x is finite: the hand-over from one stage to
the next relies on it.  (They are compiled with --use_fast_math, by which numbers below 1.2e-38 become 0.)  Other filters come nearer
to exact sums than in the torch backend, which rounds after each tap.
"""

# b batch, t seq_len, d channels, k conv_kernel (number of taps)

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from megahedge.kernels.conv_problem import ConvBackend, ConvInputs, ConvProblem
from megahedge.kernels.trial import try_once
from megahedge.utils.packages import call_fault, import_fault

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def on_gpu(problem: ConvProblem) -> bool:
    """Where the kernels run."""
    return problem.device == "cuda"


def supports(problem: ConvProblem) -> str | None:
    """A causal-conv1d that cannot be imported, or whose kernel fails at a trial, counts as missing."""
    if not on_gpu(problem):
        return "it runs on GPUs only"
    if problem.dtype not in _DTYPES:
        return "it takes fp32, fp16 and bf16"
    if not 2 <= problem.num_taps <= 4:
        return "it takes 2, 3 or 4 taps"
    if problem.num_channels % 8:
        return f"it takes channels in multiples of 8, not {problem.num_channels}"
    if problem.boundaries and problem.initial:  # up to 1.6 it forgets the initial inputs then, from 1.7 on they are of the first document
        return "it does not take initial inputs together with boundaries"
    function = load(problem.device)
    return function if isinstance(function, str) else None


def run(inputs: ConvInputs) -> Tensor:
    """y [b, t, d].  The package has tokens on the last axis; it takes documents and initial inputs only where channels lie side by side."""
    problem, x = inputs.problem, inputs.x.contiguous()
    y = load(problem.device)(
        x.transpose(1, 2),
        inputs.weight.contiguous(),
        inputs.bias,
        seq_idx=inputs.documents[:, problem.num_taps - 1 :].int().contiguous() if problem.boundaries else None,
        initial_states=inputs.initial.contiguous().transpose(1, 2) if problem.initial else None,
    )
    return y.transpose(1, 2)


@functools.cache
def load(device: str) -> Callable | str:
    """causal_conv1d_fn, or why there is none that works on this type of device."""
    try:
        from causal_conv1d import causal_conv1d_fn
    except Exception as error:  # whatever a broken wheel raises
        return import_fault("causal-conv1d", error)
    try:
        try_once(causal_conv1d_fn, torch.ones(1, 8, 8, device=device).transpose(1, 2), torch.ones(8, 4, device=device))
    except Exception as error:
        return call_fault("causal-conv1d", error)
    return causal_conv1d_fn


BACKEND = ConvBackend("causal_conv1d", supports, run)
