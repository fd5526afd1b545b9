"""Random scans of every kind, run by a backend or by the oracle, with all their gradients."""

import dataclasses
import functools
import itertools

import torch

from megahedge.kernels import BACKENDS, ScanState, scan
from megahedge.kernels.problem import Problem
from tests.kernels.oracle import attention_form

STRUCTURES = ("none", "head", "state", "channel")
STEP_AXES = (None, "shared", "state", "channel")


@dataclasses.dataclass(frozen=True)
class Case:
    """What to make at random."""

    structure: str
    step_axis: str | None
    seq_len: int = 70
    batch: int = 2
    num_heads: int = 2
    state_size: int = 6
    head_dim: int = 5
    normalize: bool = True
    documents: bool = True
    """Boundaries: at token 0 of one sequence, and consecutive ones at odd places."""
    initial: bool = True
    one_rate: bool = False
    """A rate with h = 1 for all heads."""
    largest_rate: float = 1.0
    """Rates lie between 0 and this, some of them exactly 0."""

    @property
    def per_channel(self):
        return "channel" in (self.structure, self.step_axis)

    def runnable_by(self, backend: str) -> bool:
        return self.refusal_of(backend) is None

    def refusal_of(self, backend: str) -> str | None:
        problem = Problem(
            self.structure,
            self.step_axis,
            self.normalize,
            self.state_size,
            self.head_dim,
            "cpu",
            torch.float32,
            needs_grad=True,
            boundaries=self.documents,
            initial_state=self.initial,
        )
        return BACKENDS[backend].supports(problem)


GRID = [Case(structure, step_axis) for structure, step_axis in itertools.product(STRUCTURES, STEP_AXES)]


def with_backends(cases, *, reference=False):
    """(backend, case) for every backend that runs the case; the reference, which is slow, only if asked for."""
    names = [name for name in BACKENDS if reference or name != "reference"]
    return [(backend, case) for case in cases for backend in names if case.runnable_by(backend)]


def case_id(value):
    """Of a backend's name or a case, for pytest."""
    return value if isinstance(value, str) else f"{value.structure}-{value.step_axis}-t{value.seq_len}-p{value.head_dim}"


def inputs(case, seed=0):
    """The tensors of a case by name, fp64, and its boundaries [b, t]."""
    generator = torch.Generator().manual_seed(seed)
    lead = (case.batch, case.seq_len, case.num_heads)

    def features():
        return torch.randn(*lead, case.state_size, generator=generator).softmax(dim=-1).double()

    tensors = {"C": features(), "B": features(), "V": torch.randn(*lead, case.head_dim, generator=generator).double()}
    sizes = {"shared": 1, "state": case.state_size, "channel": case.head_dim}
    if case.step_axis is not None:
        tensors["step"] = torch.rand(*lead, sizes[case.step_axis], generator=generator).double() + 0.05
    if case.structure != "none":
        shape = (1 if case.one_rate else case.num_heads, case.state_size, case.head_dim)[: STRUCTURES.index(case.structure)]
        rate = torch.rand(shape, generator=generator).double() * case.largest_rate
        rate.view(-1)[1::3] = 0.0
        tensors["rate"] = rate
    if case.initial:
        state = (case.batch, case.num_heads, case.state_size, case.head_dim)
        tensors["numerator"] = torch.randn(state, generator=generator).double()
        tensors["denominator"] = torch.rand(state if case.per_channel else state[:3], generator=generator).double()
    boundaries = None
    if case.documents:
        boundaries = torch.zeros(case.batch, case.seq_len, dtype=torch.bool)
        boundaries[0, [0, *(t for t in (3, 37, 38, 39, 64, 101) if t < case.seq_len)]] = True
        boundaries[1:, [t for t in (5, 63, 69) if t < case.seq_len]] = True
    return tensors, boundaries


def run_backend(backend, case, dtype=torch.float64, seed=0, *, tensors=None, dtypes=(), **options):
    """Outputs y, state and the gradient of every input, by name.

    tensors: instead of those of `inputs`;  dtypes: of inputs that have another than `dtype`.
    """
    made, boundaries = inputs(case, seed)
    leaves = {name: x.to(dict(dtypes).get(name, dtype)).requires_grad_() for name, x in (tensors or made).items()}
    arguments = dict(leaves)
    state = (arguments.pop("numerator", None), arguments.pop("denominator", None))
    initial = ScanState(*state) if case.initial else None
    named_axis = case.step_axis if case.step_axis in ("state", "channel") else None
    y, last = scan(
        **arguments,
        initial_state=initial,
        boundaries=boundaries,
        normalize=case.normalize,
        backend=backend,
        step_axis=named_axis,
        **options,
    )
    results = {"y": y, "last numerator": last.numerator} | ({"last denominator": last.denominator} if case.normalize else {})
    return results | gradients(results, leaves, seed)


@functools.cache
def run_oracle(case, seed=0):
    """The same from the oracle."""
    tensors, boundaries = inputs(case, seed)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    step, rate = leaves.get("step"), leaves.get("rate")
    if step is not None:
        step = step[..., None, :] if case.step_axis == "channel" else step[..., None]
    if rate is not None:
        rate = rate[(..., *[None] * (3 - rate.dim()))]
    initial = None
    if case.initial:
        denominator = leaves["denominator"]
        initial = (leaves["numerator"], denominator if case.per_channel else denominator[..., None])
    numerator, denominator, h, z = attention_form(leaves["C"], leaves["B"], leaves["V"], step, rate, initial=initial, boundaries=boundaries)
    results = {"y": numerator / denominator if case.normalize else numerator, "last numerator": h}
    if case.normalize:
        results["last denominator"] = z if case.per_channel else z[..., 0]
    return results | gradients(results, leaves, seed)


def gradients(results, leaves, seed):
    """Of a random linear function of all results, by name; zeros where an input has no part in them."""
    generator = torch.Generator().manual_seed(seed + 1)
    total = sum((x * torch.randn(x.shape, generator=generator).to(x.dtype)).sum() for x in results.values())
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {f"grad {name}": torch.zeros_like(x) if g is None else g for (name, x), g in zip(leaves.items(), grads, strict=True)}


def assert_close(results, expected, tolerance):
    """By norm: |difference| <= tolerance * |expected|, where a norm below 0.1 (a gradient that is nearly zero) counts as 0.1."""
    assert results.keys() == expected.keys()
    for name, x in results.items():
        assert x.shape == expected[name].shape, name
        error = (x.double() - expected[name]).norm() / expected[name].norm().clamp_min(0.1)
        assert error <= tolerance, f"{name}: relative error {error:.1e} > {tolerance:.1e}"  # NaN fails too
