"""Every backend computes what the O(seq_len^2) form says: outputs, last state and all gradients."""

import dataclasses

import pytest
import torch

from megahedge.kernels import chunked, scan
from tests.kernels.problems import GRID, Case, assert_close, case_id, gradients, inputs, run_backend, run_oracle, with_backends

FP64 = 1e-10
"""Some 1e5 roundings of 1e-16, and differences of decays that the oracle sums over the whole sequence."""
FP32 = 2e-5
"""Rounding (6e-8) grows in the gradient of a step, the difference of a numerator's and a denominator's part that nearly cancel."""
FEW = [Case("none", None), Case("head", "shared"), Case("state", "state"), Case("channel", "channel"), Case("channel", "state")]
LENGTHS = (1, 2, 63, 64, 65, 130)


@pytest.mark.parametrize(("backend", "case"), with_backends(GRID, reference=True), ids=case_id)
def test_backend_matches_oracle_in_fp64(backend, case):
    assert_close(run_backend(backend, case), run_oracle(case), FP64)


@pytest.mark.parametrize(("backend", "case"), with_backends(GRID), ids=case_id)
def test_backend_matches_oracle_in_fp32(backend, case):
    results = run_backend(backend, case, torch.float32)
    assert all(x.dtype == torch.float32 for x in results.values())
    assert_close(results, run_oracle(case), FP32)


@pytest.mark.parametrize(
    ("backend", "case"), with_backends(dataclasses.replace(case, seq_len=t, num_heads=1) for case in FEW for t in LENGTHS), ids=case_id
)
def test_backend_matches_oracle_at_any_length(backend, case):
    assert_close(run_backend(backend, case), run_oracle(case), FP64)


@pytest.mark.parametrize(("backend", "case"), with_backends(FEW), ids=case_id)
def test_backend_matches_oracle_without_normalisation(backend, case):
    case = dataclasses.replace(case, normalize=False, initial=True, seq_len=35)
    assert_close(run_backend(backend, case), run_oracle(case), FP64)


@pytest.mark.parametrize(("backend", "case"), with_backends(case for case in FEW if case.structure != "none"), ids=case_id)
def test_one_rate_serves_all_heads(backend, case):
    case = dataclasses.replace(case, one_rate=True, num_heads=3, seq_len=35)
    assert_close(run_backend(backend, case), run_oracle(case), FP64)


@pytest.mark.parametrize(("backend", "case"), with_backends(FEW), ids=case_id)
def test_no_state_and_no_documents(backend, case):
    case = dataclasses.replace(case, initial=False, documents=False, seq_len=35)
    assert_close(run_backend(backend, case), run_oracle(case), FP64)


@pytest.mark.parametrize(
    ("backend", "case"),
    with_backends(
        dataclasses.replace(case, head_dim=p, state_size=2 * p, seq_len=2, batch=1, num_heads=1, initial=False)
        for case in FEW[:4]
        for p in (32, 64, 80, 128, 256)
    ),
    ids=case_id,
)
def test_backend_matches_oracle_at_the_head_dims_of_pythia(backend, case):
    assert_close(run_backend(backend, case, torch.float32), run_oracle(case), FP32)


@pytest.mark.parametrize(("backend", "case"), with_backends([Case("channel", "channel"), Case("state", "shared")]), ids=case_id)
def test_state_size_may_equal_head_dim(backend, case):
    case = dataclasses.replace(case, state_size=5, seq_len=9)
    assert_close(run_backend(backend, case), run_oracle(case), FP64)


@pytest.mark.parametrize(("backend", "case"), with_backends(case for case in GRID if case.structure != "none"), ids=case_id)
def test_decays_up_to_exp_of_minus_1000_are_finite_and_right(backend, case):
    case = dataclasses.replace(case, largest_rate=1000.0, num_heads=1)
    # 1e-9: the oracle's sums of decays reach 7e4, and their differences lose five digits.
    assert_close(run_backend(backend, case), run_oracle(case), 1e-9)
    # Few pairs of tokens carry the gradient of such a decay: their rounding does not average out.
    assert_close(run_backend(backend, case, torch.float32), run_oracle(case), 5 * FP32)


@pytest.mark.parametrize("seq_len", (1, 2, 3))
@pytest.mark.parametrize(("backend", "case"), with_backends(case for case in FEW if case.structure != "none"), ids=case_id)
def test_the_strongest_decays_may_come_in_the_shortest_sequences(backend, case, seq_len):
    case = dataclasses.replace(case, largest_rate=1000.0, seq_len=seq_len)
    assert_close(run_backend(backend, case), run_oracle(case), 1e-9)


@pytest.mark.parametrize("largest", (1e3, 1e5, 1e8))
@pytest.mark.parametrize("structure", ("head", "state"))
def test_chunked_keeps_the_digits_of_decays_beside_a_very_large_one(structure, largest):
    """A token that forgets everything leaves the decay of those after it as it is."""
    tensors, _ = inputs(Case(structure, "shared", seq_len=100, initial=False, documents=False))
    tensors["step"] = torch.full_like(tensors["step"], 0.1)
    tensors["step"][:, 50] = largest
    found = {}
    for backend, dtype in (("reference", torch.float64), ("chunked", torch.float32)):
        leaves = {name: tensors[name].detach().to(dtype).requires_grad_() for name in ("C", "B", "V", "step", "rate")}
        y, state = scan(**leaves, backend=backend)
        results = {"y": y, "last numerator": state.numerator, "last denominator": state.denominator}
        found[backend] = results | gradients(results, leaves, seed=0)
    assert_close(found["chunked"], found["reference"], FP32)


@pytest.mark.parametrize("largest_rate", (0.0, 20.0))
@pytest.mark.parametrize(("backend", "case"), with_backends(case for case in FEW if case.structure != "none"), ids=case_id)
def test_gradients_are_right_at_zero_and_at_strong_decay(backend, case, largest_rate):
    case = dataclasses.replace(case, largest_rate=largest_rate, num_heads=1)
    assert_close(run_backend(backend, case), run_oracle(case), FP64)
    assert_close(run_backend(backend, case, torch.float32), run_oracle(case), FP32)


@pytest.mark.parametrize("backend", sorted({name for name, _ in with_backends(GRID)}))
def test_long_sequences_lose_no_digits(backend):
    case = Case("channel", "channel") if not Case("state", "state").runnable_by(backend) else Case("state", "state")
    case = dataclasses.replace(case, seq_len=1000, batch=1, num_heads=1, state_size=3, head_dim=2, documents=False, largest_rate=10.0)
    assert_close(run_backend(backend, case, torch.float32), run_backend("reference", case), FP32)


@pytest.mark.parametrize("chunks", (4, 2, 1), ids="{} chunks".format)
@pytest.mark.parametrize("largest_rate", (1.0, 3.0, 20.0), ids="rates up to {}".format)
@pytest.mark.parametrize("case", [case for case in GRID if case.runnable_by("chunked")], ids=case_id)
def test_chunked_is_right_over_several_segments(case, largest_rate, chunks, monkeypatch):
    """Segments of two chunks, the last one cut short; decays that are split in the middle of a chunk, and in small blocks."""
    monkeypatch.setitem(chunked.SEGMENT_ELEMENTS, "cpu", chunks * 2 * 3 * chunked.CHUNK_SIZE)
    case = dataclasses.replace(case, seq_len=200, state_size=3, head_dim=2, largest_rate=largest_rate)
    assert_close(run_backend("chunked", case), run_oracle(case), FP64)
    assert_close(run_backend("chunked", case, torch.float32), run_oracle(case), FP32)


def test_chunked_leaves_out_what_is_not_asked_for():
    """Gradients of some inputs only, as in stage 1, where V is frozen."""
    tensors, _ = inputs(Case("state", "shared"))
    everything = run_backend("chunked", Case("state", "shared", initial=False, documents=False))
    for names in (("C", "B"), ("rate",), ("V",), ("step",)):
        leaves = {name: tensors[name].clone().requires_grad_(name in names) for name in ("C", "B", "V", "step", "rate")}
        y, state = scan(**leaves, backend="chunked")
        results = {"y": y, "last numerator": state.numerator, "last denominator": state.denominator}
        found = gradients(results, {name: leaves[name] for name in names}, seed=0)
        for name in names:
            torch.testing.assert_close(found[f"grad {name}"], everything[f"grad {name}"], rtol=1e-12, atol=1e-12)
