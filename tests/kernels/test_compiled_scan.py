"""The scan as an operator: torch.compile has it in its graph whole, and what comes out is what an eager scan gives."""

import dataclasses

import pytest
import torch

from megahedge.kernels import DenominatorStats, ScanState, scan
from tests.kernels.problems import GRID, Case, assert_close, case_id, gradients, inputs, run_backend


@pytest.fixture(autouse=True)
def compile_anew():
    """Each case by itself: all of them would be too many versions of one function."""
    torch.compiler.reset()


def compiled_scan(**arguments):
    """A break of the graph is an error."""
    return torch.compile(lambda **given: scan(**given), fullgraph=True, backend="aot_eager")(**arguments)


@pytest.mark.parametrize("case", [dataclasses.replace(case, seq_len=9) for case in GRID], ids=case_id)
def test_a_compiled_scan_is_an_eager_one(case):
    expected = run_backend("auto", case)
    tensors, boundaries = inputs(case)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    arguments = dict(leaves)
    initial = ScanState(arguments.pop("numerator"), arguments.pop("denominator"))
    axis = case.step_axis if case.step_axis in ("state", "channel") else None
    y, last = compiled_scan(**arguments, initial_state=initial, boundaries=boundaries, step_axis=axis)
    results = {"y": y, "last numerator": last.numerator, "last denominator": last.denominator}
    assert_close(results | gradients(results, leaves, 0), expected, 1e-12)


def test_without_normalisation_state_and_documents():
    case = Case("head", "shared", seq_len=9, normalize=False, initial=False, documents=False)
    tensors, _ = inputs(case)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    y, last = compiled_scan(**leaves, normalize=False)
    assert last.denominator is None
    results = {"y": y, "last numerator": last.numerator}
    assert_close(results | gradients(results, leaves, 0), run_backend("auto", case), 1e-12)


def test_denominators_are_counted():
    tensors, _ = inputs(Case("none", None, seq_len=9))
    counted, expected = DenominatorStats(), DenominatorStats()
    arguments = {name: tensors[name] for name in ("C", "B", "V")}
    arguments["C"][:, 3] *= -1.0
    arguments["C"][:, 5] = 0.0
    compiled_scan(**arguments, stats=counted)
    scan(**arguments, stats=expected)
    names = ("total", "clamped", "negative")
    assert [int(getattr(counted, name)) for name in names] == [int(getattr(expected, name)) for name in names] == [36, 4, 4]


def test_the_operator_keeps_to_torchs_rules():
    case = Case("channel", "channel", seq_len=5)
    tensors, boundaries = inputs(case)
    leaves = [x.requires_grad_() for x in tensors.values()]
    arguments = (*leaves, boundaries, True, "auto", "channel", 1e-30, True)
    torch.library.opcheck(torch.ops.megahedge_kernels_operator.scan.default, arguments)
