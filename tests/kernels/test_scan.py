"""The contract of scan and scan_step, whatever the backend."""

import itertools
import logging

import pytest
import torch

from megahedge.kernels import BACKENDS, DenominatorStats, ScanState, scan, scan_step
from megahedge.kernels.normaliser import normalise
from megahedge.utils.errors import InputError
from megahedge.utils.logging import log_once
from megahedge.utils.words import either
from tests.kernels.problems import GRID, STRUCTURES, Case, case_id, inputs, with_backends

FEW = [Case("none", None), Case("head", "shared"), Case("state", "state"), Case("channel", "channel"), Case("channel", "state")]
SMALL = {"batch": 1, "num_heads": 1, "initial": False, "documents": False}
WIDE = [Case(c.structure, c.step_axis, seq_len=66, head_dim=32, state_size=64, **SMALL) for c in FEW]
ULP32 = torch.finfo(torch.float32).eps


def arguments(case, dtype=torch.float32):
    """C, B, V, step, rate of a case, without its boundaries and state."""
    tensors, _ = inputs(case)
    return {name: tensors[name].to(dtype) for name in ("C", "B", "V", "step", "rate") if name in tensors}


def part(tensors, start, stop):
    return {name: x if name == "rate" else x[:, start:stop] for name, x in tensors.items()}


def token(tensors, t):
    return {name: x if name == "rate" else x[:, t] for name, x in tensors.items()}


def signed(tensors):
    generator = torch.Generator().manual_seed(3)
    return tensors | {name: torch.randn(tensors[name].shape, generator=generator) for name in ("C", "B")}


@pytest.mark.parametrize(("backend", "case"), with_backends(WIDE, reference=True), ids=case_id)
def test_values_of_one_give_one(backend, case):
    tensors = arguments(case)
    y, _ = scan(**tensors | {"V": torch.ones_like(tensors["V"])}, backend=backend)
    assert ((y - 1).abs() <= 4 * ULP32).all()


@pytest.mark.parametrize(("backend", "case"), with_backends(WIDE, reference=True), ids=case_id)
def test_values_of_one_give_one_with_features_of_either_sign(backend, case):
    tensors = signed(arguments(case))
    tensors["V"] = torch.ones_like(tensors["V"])
    y, _ = scan(**tensors, backend=backend, eps=1e-6)
    denominator, _ = scan(**tensors, backend=backend, normalize=False)
    size, _ = scan(**tensors | {"C": tensors["C"].abs(), "B": tensors["B"].abs()}, backend=backend, normalize=False)
    kept = denominator.abs() >= 2e-6
    # numerator and denominator may be summed in different order: 4 ulp of what they are sums of
    assert kept.float().mean() > 0.9
    assert ((y - 1).abs() <= 4 * ULP32 * (size / denominator.abs()).clamp_min(1))[kept].all()


@pytest.mark.parametrize("sign", ("positive", "signed"))
@pytest.mark.parametrize(("backend", "case"), with_backends(WIDE, reference=True), ids=case_id)
def test_first_token_of_a_document_gives_its_value(backend, case, sign):
    tensors = arguments(case) if sign == "positive" else signed(arguments(case))
    boundaries = torch.zeros(case.batch, case.seq_len, dtype=torch.bool)
    boundaries[:, 37] = True
    y, _ = scan(**tensors, boundaries=boundaries, backend=backend)
    for t in (0, 37):
        V = tensors["V"][:, t]
        assert ((y[:, t] - V).abs() <= 4 * ULP32 * V.abs()).all()


@pytest.mark.parametrize(("backend", "case"), with_backends(FEW), ids=case_id)
def test_two_halves_equal_one_scan(backend, case):
    tensors = arguments(case, torch.float64)
    y, last = scan(**tensors, backend=backend)
    first, middle = scan(**part(tensors, 0, 41), backend=backend)
    second, end = scan(**part(tensors, 41, 70), backend=backend, initial_state=middle)
    torch.testing.assert_close(torch.cat((first, second), dim=1), y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(end.numerator, last.numerator, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(end.denominator, last.denominator, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("backend", "case"), with_backends(FEW), ids=case_id)
def test_packed_documents_equal_documents_apart(backend, case):
    tensors = {name: x.requires_grad_() for name, x in arguments(case, torch.float64).items()}
    starts = [0, 1, 30, 64, 70]
    boundaries = torch.zeros(case.batch, case.seq_len, dtype=torch.bool)
    boundaries[:, starts[:-1]] = True
    packed, last = scan(**tensors, backend=backend, boundaries=boundaries)
    pieces = [scan(**part(tensors, *ends), backend=backend) for ends in itertools.pairwise(starts)]
    apart = torch.cat([y for y, _ in pieces], dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last.numerator, pieces[-1][1].numerator, rtol=1e-12, atol=1e-12)
    leaves = list(tensors.values())
    grads = (torch.autograd.grad(y.square().sum(), leaves) for y in (packed, apart))
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("normalize", (True, False))
@pytest.mark.parametrize("case", GRID, ids=case_id)
def test_scan_step_continues_a_scan(case, normalize):
    tensors = arguments(case, torch.float64)
    expected, last = scan(**tensors, normalize=normalize)
    _, state = scan(**part(tensors, 0, 65), normalize=normalize)
    kept = state.numerator.clone()
    ys, after = [], state
    for t in range(65, 70):
        y, after = scan_step(**token(tensors, t), state=after, normalize=normalize)
        ys.append(y)
    torch.testing.assert_close(torch.stack(ys, dim=1), expected[:, 65:], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after.numerator, last.numerator, rtol=1e-12, atol=1e-12)
    assert torch.equal(state.numerator, kept)
    assert (after.denominator is None) == (not normalize)


@pytest.mark.parametrize("case", GRID, ids=case_id)
def test_scan_step_may_move_a_state_on_in_its_own_memory(case):
    tensors = arguments(case, torch.float64)
    with torch.no_grad():
        _, state = scan(**part(tensors, 0, 65))
        expected, after = scan_step(**token(tensors, 65), state=state)
        y, moved = scan_step(**token(tensors, 65), state=state, in_place=True)
    assert torch.equal(y, expected)
    for found, given, wanted in (
        (moved.numerator, state.numerator, after.numerator),
        (moved.denominator, state.denominator, after.denominator),
    ):
        assert found.data_ptr() == given.data_ptr() and torch.equal(given, wanted)
    with pytest.raises(ValueError, match="no_grad"):
        scan_step(**token(tensors, 66), state=state, in_place=True)


def test_scan_step_starts_without_a_state():
    tensors = arguments(FEW[2], torch.float64)
    y, _ = scan_step(**token(tensors, 0))
    torch.testing.assert_close(y, tensors["V"][:, 0], rtol=1e-12, atol=0)


@pytest.mark.parametrize(("backend", "case"), with_backends(FEW, reference=True), ids=case_id)
def test_bf16_inputs_are_computed_in_fp32(backend, case):
    rounded = arguments(case, torch.bfloat16)
    y, state = scan(**rounded, backend=backend)
    expected, last = scan(**{name: x.float() for name, x in rounded.items()}, backend=backend)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected.bfloat16())
    assert state.numerator.dtype == state.denominator.dtype == torch.float32
    assert torch.equal(state.numerator, last.numerator)


@pytest.mark.parametrize(("backend", "case"), with_backends(FEW), ids=case_id)
def test_autocast_changes_nothing(backend, case):
    tensors = {name: x.requires_grad_() for name, x in arguments(case).items()}
    leaves = list(tensors.values())
    y, _ = scan(**tensors, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = scan(**tensors, backend=backend)
        step, _ = scan_step(**token(tensors, 0))
    assert cast.dtype == step.dtype == torch.float32
    assert torch.equal(cast, y)
    assert all(map(torch.equal, *(torch.autograd.grad(out.square().sum(), leaves) for out in (y, cast))))


@pytest.mark.parametrize(("backend", "case"), with_backends(FEW, reference=True), ids=case_id)
def test_strides_do_not_matter_and_inputs_stay_as_they_are(backend, case):
    tensors = arguments(case)
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in tensors.items()}
    assert not strided["V"].is_contiguous()
    y, _ = scan(**strided, backend=backend)
    torch.testing.assert_close(y, scan(**tensors, backend=backend)[0], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(strided[name], x) for name, x in tensors.items())


@pytest.mark.parametrize("seq_len", (1, 70))
@pytest.mark.parametrize(("backend", "case"), with_backends(FEW), ids=case_id)
def test_features_that_never_meet_give_finite_values_and_gradients(backend, case, seq_len):
    tensors = part(arguments(case), 0, seq_len)
    tensors["C"][..., ::2] = 0.0
    tensors["B"][..., 1::2] = 0.0
    tensors = {name: x.requires_grad_() for name, x in tensors.items()}
    y, _ = scan(**tensors, backend=backend)
    assert (y == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), list(tensors.values()), allow_unused=True) if g is not None)


def test_small_denominators_keep_their_sign_and_have_no_gradient():
    denominator = torch.tensor([2.0, -2.0, 1e-7, -1e-7, 0.0, -0.0], requires_grad=True)
    numerator = torch.ones(6, requires_grad=True)
    y = normalise(numerator.clone(), denominator, 1e-6)
    torch.testing.assert_close(y, torch.tensor([0.5, -0.5, 1e6, -1e6, 1e6, 1e6]))
    y.sum().backward()
    torch.testing.assert_close(denominator.grad, torch.tensor([-0.25, -0.25, 0.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(numerator.grad, y.detach())


def test_denominators_are_counted_on_request():
    C = torch.tensor([1.0, -1.0, 0.0]).view(1, 3, 1, 1)
    stats = DenominatorStats()
    for _ in range(2):
        scan(C, torch.ones(1, 3, 1, 1), torch.ones(1, 3, 1, 2), eps=1e-6, stats=stats)
    assert (stats.total, int(stats.clamped), int(stats.negative)) == (6, 2, 2)


@pytest.mark.parametrize("case", GRID, ids=case_id)
def test_auto_takes_the_first_backend_that_fits_and_never_the_reference(case, monkeypatch):
    chosen = []
    for name, backend in BACKENDS.items():
        problem_seen = type(backend)(name, backend.supports, lambda inputs, run=backend.run, name=name: chosen.append(name) or run(inputs))
        monkeypatch.setitem(BACKENDS, name, problem_seen)
    scan(**part(arguments(case), 0, 3))
    assert chosen == [next(name for name in BACKENDS if case.runnable_by(name))]
    assert chosen != ["reference"]


def test_auto_says_once_what_it_took(monkeypatch):
    records = []
    logger = logging.getLogger("megahedge.kernels")
    log_once.cache_clear()
    monkeypatch.setattr(logger, "handle", records.append)
    monkeypatch.setattr(logger, "disabled", False)
    tensors = part(arguments(Case("head", "shared")), 0, 3)
    for _ in range(2):
        scan(**tensors)
    assert [record.getMessage() for record in records] == ["scan with decay by head, step by head, float32 on cpu: backend chunked"]


def test_a_named_backend_runs_or_says_why_not():
    with pytest.raises(InputError, match=r"'chunked' cannot run .*between the channels of V; use auto, (numba, )?loop or reference"):
        scan(**arguments(Case("channel", "state")), backend="chunked")
    with pytest.raises(InputError, match=f"no scan backend 'fast'; use auto, {either(BACKENDS)}"):
        scan(**arguments(Case("none", None)), backend="fast")


def test_a_step_of_size_n_and_p_needs_its_axis_named():
    tensors = arguments(Case("channel", "channel", state_size=5))
    with pytest.raises(ValueError, match=r"n = p = 5: say by step_axis"):
        scan(**tensors)
    by_channel, by_state = (scan(**tensors, step_axis=axis)[0] for axis in ("channel", "state"))
    assert not torch.allclose(by_channel, by_state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"B": torch.ones(2, 70, 2, 7)}, r"C and B are \[b, t, h, n\]"),
        ({"V": torch.ones(2, 69, 2, 5)}, r"V \[b, t, h, p\]"),
        ({"step": torch.ones(2, 70, 2, 4)}, r"last axis of step has size 4; n = 6, p = 5"),
        ({"step": torch.ones(2, 70, 2)}, r"step is \[b, t, h, 1 \| n \| p\]"),
        ({"step_axis": "head"}, r"step_axis is 'state', 'channel' or None, not 'head'"),
        ({"rate": torch.ones(3)}, r"rate is \[h\], \[h, n\] or \[h, n, p\] with h = 1 or 2, n = 6, p = 5, not \[3\]"),
        ({"rate": torch.ones(2, 5)}, r"not \[2, 5\]"),
        ({"boundaries": torch.zeros(2, 70)}, r"boundaries is \[b, t\] bool"),
        ({"initial_state": ScanState(torch.ones(2, 2, 5, 6), None)}, r"numerator is \[2, 2, 6, 5\] here, not \[2, 2, 5, 6\]"),
        ({"initial_state": ScanState(torch.ones(2, 2, 6, 5), None)}, r"denominator is \[2, 2, 6\] here, not None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_shapes_that_do_not_fit_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        scan(**arguments(Case("head", "shared")) | changed)


@pytest.mark.parametrize("empty", range(4))
def test_nothing_to_scan_is_refused(empty):
    shape = [2, 3, 2, 4]
    shape[empty] = 0
    with pytest.raises(ValueError, match="none of which may be 0"):
        scan(torch.ones(shape), torch.ones(shape), torch.ones(*shape[:3], 5))


def test_a_step_whose_shapes_do_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"none of which may be 0, not \[2, 2, 6\], \[2, 2, 7\], \[2, 2, 5\]"):
        scan_step(torch.ones(2, 2, 6), torch.ones(2, 2, 7), torch.ones(2, 2, 5))


def test_every_structure_has_a_backend_that_is_faster_than_the_reference():
    assert {case.structure for _, case in with_backends(GRID)} == set(STRUCTURES)
    assert list(BACKENDS)[-1] == "reference"


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_dtypes_that_the_arithmetic_does_not_know_are_refused(dtype):
    """Outputs would have V's dtype, and so lose what makes them numbers."""
    C, V = torch.rand(2, 5, 3, 4), torch.ones(2, 5, 3, 6)
    for call in (lambda: scan(C, C, V.to(dtype)), lambda: scan_step(C[:, 0], C[:, 0], V[:, 0].to(dtype))):
        with pytest.raises(ValueError, match=f"of 16 to 64 bits, not torch.float32, torch.float32, {dtype}"):
            call()


@pytest.mark.parametrize("eps", [0, -1e-6, float("nan"), float("inf"), torch.tensor(1e-6)], ids=str)
def test_an_eps_that_is_no_small_number_is_refused(eps):
    C = torch.rand(2, 5, 3, 4)
    for call in (lambda: scan(C, C, C, eps=eps), lambda: scan_step(C[:, 0], C[:, 0], C[:, 0], eps=eps)):
        with pytest.raises(ValueError, match="eps is a number above 0, not"):
            call()


def test_a_step_of_no_size_or_whose_own_step_does_not_fit_is_refused():
    C, V = torch.rand(2, 3, 4), torch.ones(2, 3, 6)
    with pytest.raises(ValueError, match="none of which may be 0"):
        scan_step(C, C, V[..., :0])
    with pytest.raises(ValueError, match=r"step is \[b, h, 1 \| n \| p\] with b, h = \[2, 3\], not \[2, 1, 3, 1\]"):
        scan_step(C, C, V, torch.ones(2, 1, 3, 1))


def test_a_state_that_cannot_move_on_in_place_is_refused():
    """Its copy in the arithmetic's dtype would, and the caller's stay behind."""
    C, V = torch.rand(2, 3, 4), torch.ones(2, 3, 6)
    with torch.no_grad():
        _, state = scan_step(C, C, V)
        narrow = ScanState(state.numerator.bfloat16(), state.denominator.bfloat16())
        with pytest.raises(ValueError, match=r"moves a state on that is torch.float32, not torch.bfloat16"):
            scan_step(C, C, V, state=narrow, in_place=True)
        scan_step(C, C, V, state=narrow)
