"""Every backend against the reference in fp64 on the same inputs: outputs, last state and all gradients, by relative Frobenius norm."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from megahedge.kernels import scan
from tests.kernels.problems import Case, case_id, gradients, with_backends

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""By the dtype of C, B and V.  fp32 rounds to 6e-8, and sums of up to a thousand tokens and 512 features lose some digits; bf16 outputs
and gradients are rounded to 4e-3 at the end."""
STRUCTURES = [Case("none", None), Case("head", "shared"), Case("state", "shared"), Case("state", "state"), Case("channel", "channel")]
STRUCTURES += [Case("channel", "state")]
LENGTHS, HEAD_DIMS, LARGEST_RATES = (1, 2, 63, 64, 65, 127, 1000), (32, 64, 80, 128, 256), (0.0, 0.3, 3.0, 30.0)


def of_length(case: Case, seq_len: int) -> Case:
    return dataclasses.replace(case, seq_len=seq_len, batch=1, num_heads=2, state_size=16, head_dim=8)


def of_head_dim(case: Case, head_dim: int) -> Case:
    return dataclasses.replace(case, seq_len=65, batch=1, num_heads=1, state_size=2 * head_dim, head_dim=head_dim)


def make_inputs(case: Case, largest_rate: float, sharpness: float = 1.0) -> dict[str, torch.Tensor]:
    """As a mixer makes them, fp32: features of sum 1, steps near 1, rates up to the largest."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    lead = (case.batch, case.seq_len, case.num_heads)
    sizes = {"head": case.num_heads, "state": case.state_size, "channel": case.head_dim, "shared": 1}
    tensors = {"C": (sharpness * normal(*lead, case.state_size)).softmax(-1), "B": (sharpness * normal(*lead, case.state_size)).softmax(-1)}
    tensors["V"] = normal(*lead, case.head_dim)
    if case.step_axis:
        tensors["step"] = F.softplus(0.54 + 0.3 * normal(*lead, sizes[case.step_axis]))
    if case.structure != "none":
        axes = ("head", "state", "channel")[: ("head", "state", "channel").index(case.structure) + 1]
        tensors["rate"] = largest_rate * torch.rand([sizes[axis] for axis in axes], generator=generator)
    return tensors


def run(backend: str, tensors: dict[str, torch.Tensor], case: Case, boundaries=None, *, numerator_only=False) -> dict[str, torch.Tensor]:
    """Outputs, last state, and gradients of a random function of the outputs; or of that as if normalisers were constants."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    options = {
        "backend": backend,
        "boundaries": boundaries,
        "step_axis": case.step_axis if case.step_axis in ("state", "channel") else None,
    }
    y, state = scan(**leaves, **options)
    if numerator_only:
        numerator, _ = scan(**leaves, **options, normalize=False)
        y = numerator * (y / numerator).detach()
    return {"y": y, "last numerator": state.numerator.detach()} | gradients({"y": y}, leaves, seed=5)


def assert_accurate(backend: str, case: Case, tensors: dict[str, torch.Tensor], boundaries=None) -> None:
    """A gradient's error is compared with its part that comes through the numerator, if that is larger than the whole.

    The part through the denominator may cancel it: a document's first output is its V, whatever C is.
    """
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    expected, parts = run("reference", wide, case, boundaries), run("reference", wide, case, boundaries, numerator_only=True)
    tolerance = TOLERANCES[tensors["V"].dtype]
    for name, found in run(backend, tensors, case, boundaries).items():
        size = torch.maximum(expected[name].norm(), parts[name].norm())
        error = (found.double() - expected[name]).norm()
        assert error <= tolerance * size, f"{name}: {error:.1e} of {size:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("largest_rate", LARGEST_RATES)
@pytest.mark.parametrize(
    ("backend", "case"), with_backends(of_length(case, seq_len) for case in STRUCTURES[1:] for seq_len in LENGTHS), ids=case_id
)
def test_lengths_and_rates(backend, case, largest_rate):
    assert_accurate(backend, case, make_inputs(case, largest_rate))


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "case"), with_backends(of_length(STRUCTURES[0], seq_len) for seq_len in LENGTHS), ids=case_id)
def test_lengths_without_decay(backend, case):
    assert_accurate(backend, case, make_inputs(case, largest_rate=0.0))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("backend", "case"), with_backends(of_head_dim(case, head_dim) for case in STRUCTURES[::2] for head_dim in HEAD_DIMS), ids=case_id
)
def test_head_dims_and_dtypes(backend, case, dtype):
    tensors = make_inputs(case, largest_rate=0.3)
    assert_accurate(backend, case, tensors | {name: tensors[name].to(dtype) for name in "CBV"})


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "case"), with_backends(of_length(case, 127) for case in STRUCTURES), ids=case_id)
def test_features_that_hardly_overlap(backend, case):
    """All but one of a token's features are near 0: most normalisers are far below 1, and some below 1e-20."""
    assert_accurate(backend, case, make_inputs(case, largest_rate=0.3, sharpness=30.0))


@pytest.mark.slow
@pytest.mark.parametrize("largest_rate", LARGEST_RATES[1::2])
@pytest.mark.parametrize(("backend", "case"), with_backends(of_length(case, 127) for case in STRUCTURES), ids=case_id)
def test_documents_that_begin_at_every_odd_place(backend, case, largest_rate):
    boundaries = torch.zeros(case.batch, case.seq_len, dtype=torch.bool)
    boundaries[:, 1::2] = True
    assert_accurate(backend, case, make_inputs(case, largest_rate), boundaries)
