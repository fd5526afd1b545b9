"""Scan on a GPU by the kernels of mamba-ssm, which is optional: Mamba's for decays by channel, Mamba-2's for decays by head and for none.

Mamba's selective scan takes at most 256 states, so that a larger state is cut; outputs add up over the pieces.  It has no normaliser,
so that the denominator is a second scan, of ones.  In Mamba-2's scan by chunks the denominator is one more column of V.

States are fp32 in both.  But Mamba-2's matrix products are TF32, with errors of about 1e-3, unless TRITON_F32_DEFAULT=ieee is set before
the first scan; and it takes the decay between two tokens of a chunk from the difference of two fp32 sums.
"""

# b batch, t seq_len, h num_local_heads, n state_size, p head_dim, q columns of V and the one of the denominator

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from megahedge.kernels.problem import Backend, Problem, ScanInputs, ScanOutputs
from megahedge.kernels.trial import try_once
from megahedge.utils.packages import call_fault, import_fault

MOST_STATES = 256
"""Of a selective scan."""
CHUNK_SIZE = 128


def on_gpu(problem: Problem) -> bool:
    """Where the kernels run."""
    return problem.device == "cuda"


def supports(problem: Problem) -> str | None:
    """A mamba-ssm that cannot be imported, or whose kernel fails at a trial, counts as missing."""
    if not on_gpu(problem):
        return "it runs on GPUs only"
    if problem.dtype != torch.float32:
        return "its states are fp32"
    if problem.decay_per_channel:
        reason, load = _selective_scan_refuses(problem), _load_selective_scan
    else:
        reason, load = _chunk_scan_refuses(problem), _load_chunk_scan
    if reason is not None:
        return reason
    function = load(problem.device)
    return function if isinstance(function, str) else None


def _selective_scan_refuses(problem: Problem) -> str | None:
    if problem.step_axis == "state":
        return "its step may differ between the channels of V, not along the state"
    if problem.boundaries:
        return "with a decay by channel it resets no state at boundaries"
    if problem.initial_state:
        return "with a decay by channel it starts from no initial state"
    return None


def _chunk_scan_refuses(problem: Problem) -> str | None:
    if problem.structure not in ("none", "head"):
        return "it has decays by head and by channel, none along the state"
    if problem.step_axis not in (None, "shared"):
        return "without a decay by channel, its step is one number of a head"
    return None


def run(inputs: ScanInputs) -> ScanOutputs:
    """Shapes as in ScanInputs."""
    return _run_selective_scan(inputs) if inputs.problem.decay_per_channel else _run_chunk_scan(inputs)


def _run_selective_scan(inputs: ScanInputs) -> ScanOutputs:
    """The channels of all heads are those of one Mamba layer; those of a head are a group, which has one C and B."""
    step = inputs.step.squeeze(-2).expand_as(inputs.V)
    numerator, h = _scan_channels(inputs, inputs.V, step)
    if inputs.denominator is None:
        return numerator, None, h, None
    denominator, z = _scan_channels(inputs, torch.ones_like(inputs.V), step)
    return numerator, denominator, h, z


def _scan_channels(inputs: ScanInputs, V: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [b, t, h, p] and last state [b, h, n, p] for V and step [b, t, h, p]."""
    heads, state_size, head_dim = V.shape[2], inputs.C.shape[3], V.shape[3]
    scan = _load_selective_scan(inputs.problem.device)
    u, delta = (x.flatten(2).transpose(1, 2).contiguous() for x in (V, step))  # [b, h p, t]
    A = -inputs.rate.expand(heads, state_size, head_dim).transpose(1, 2).flatten(0, 1)  # [h p, n]
    B, C = (x.permute(0, 2, 3, 1) for x in (inputs.B, inputs.C))  # [b, h, n, t]
    outputs, states = None, []
    for first in range(0, state_size, MOST_STATES):
        some = slice(first, first + MOST_STATES)
        piece = (u, delta, A[:, some].contiguous(), B[:, :, some].contiguous())
        y, last = scan(*piece, C[:, :, some].contiguous(), return_last_state=True)
        outputs = y if outputs is None else outputs + y
        states.append(_LastState.apply(last.detach(), scan, *piece))
    last = torch.cat(states, dim=-1).unflatten(1, (heads, head_dim))
    return outputs.transpose(1, 2).unflatten(2, (heads, head_dim)), last.transpose(2, 3).contiguous()


class _LastState(torch.autograd.Function):
    """The last state [b, h p, n] of a selective scan, whose own backward leaves out the gradient of it, without a word.

    Only where a gradient arrives does this cost anything: the scan runs again, with n more tokens that read the state row by row.
    """

    @staticmethod
    def forward(ctx, last, scan, u, delta, A, B):
        ctx.save_for_backward(u, delta, A, B)
        ctx.scan = scan
        return last.clone()  # of all that the package keeps for its backward, `last` is a view

    @staticmethod
    @once_differentiable
    def backward(ctx, slope):
        seq_len, state_size = ctx.saved_tensors[3].shape[-1], ctx.saved_tensors[3].shape[-2]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            u, delta, A, B = leaves
            u, delta, B = (pad(x, (0, state_size)) for x in (u, delta, B))  # with a step of 0 they add nothing and let nothing decay
            C = pad(torch.eye(state_size, dtype=B.dtype, device=B.device), (seq_len, 0)).expand_as(B).contiguous()
            rows = ctx.scan(u, delta, A, B, C)[..., seq_len:]
            return None, None, *torch.autograd.grad(rows, leaves, slope)


def _run_chunk_scan(inputs: ScanInputs) -> ScanOutputs:
    """An initial state belongs to document 0: the package's kernels compare its number, 0, with that of each token, forwards and back."""
    problem, V = inputs.problem, inputs.V
    state = inputs.numerator
    if inputs.denominator is not None:
        V, state = pad(V, (0, 1), value=1.0), torch.cat((state, inputs.denominator), dim=-1)
    rate = V.new_zeros(1) if inputs.rate is None else inputs.rate.flatten()
    y, last = _load_chunk_scan(problem.device)(
        V,
        inputs.step.flatten(3).squeeze(-1).contiguous(),
        -rate.expand(V.shape[2]).contiguous(),
        inputs.B,
        inputs.C,
        CHUNK_SIZE,
        initial_states=state.transpose(2, 3).contiguous() if problem.initial_state else None,  # [b, h, q, n]
        seq_idx=None if inputs.boundaries is None else inputs.boundaries.cumsum(dim=1, dtype=torch.int32),
        return_final_states=True,
    )
    last = last.transpose(2, 3)  # [b, h, n, q]
    if inputs.denominator is None:
        return y, None, last.contiguous(), None
    columns = (problem.head_dim, 1)
    numerator, denominator = y.split(columns, dim=-1)
    # The numerator's memory will be the quotient's, while the package keeps y for its backward.
    return numerator.clone(), denominator, *(part.contiguous() for part in last.split(columns, dim=-1))


@functools.cache
def _load_selective_scan(device: str) -> Callable | str:
    """selective_scan_fn, or why there is none that works on this type of device."""
    shapes = ((1, 8, 16), (1, 8, 16), (8, 16), (1, 1, 16, 16), (1, 1, 16, 16))  # of u, delta, A, B and C
    return _working("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", device, shapes)


@functools.cache
def _load_chunk_scan(device: str) -> Callable | str:
    """mamba_chunk_scan_combined, or why there is none that works on this type of device."""
    shapes = ((1, 16, 1, 16), (1, 16, 1), (1,), (1, 16, 1, 16), (1, 16, 1, 16))  # of x, dt, A, B and C
    return _working("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", device, shapes, CHUNK_SIZE)


def _working(module: str, name: str, device: str, shapes: tuple[tuple[int, ...], ...], *others) -> Callable | str:
    """A function of the package, or what is wrong with it, found out by a call of it with tensors of these shapes."""
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a broken wheel raises
        return import_fault("mamba-ssm", error)
    try:
        # negative, as A has to be
        try_once(function, *(torch.full(shape, -0.5, device=device) for shape in shapes), *others)
    except Exception as error:
        return call_fault("mamba-ssm", error)
    return function


BACKEND = Backend("mamba_ssm", supports, run)
