"""The scan on mamba-ssm: the mapping, by the package's own reference functions in place of its CUDA functions, and broken packages."""

# b batch, t seq_len, h num_heads, p head_dim, n state_size, g groups

import dataclasses
import itertools

import pytest
import torch
from torch.nn.functional import pad

from megahedge.kernels import BACKENDS, mamba_ssm_backend, scan
from megahedge.utils.errors import InputError
from megahedge.utils.logging import get_logger, log_once
from megahedge.utils.packages import Broken
from tests.kernels.foreign import BREAKS, import_or_skip, install_fake, uninstall
from tests.kernels.problems import GRID, Case, assert_close, case_id, inputs, run_backend

INTERFACE = "mamba_ssm.ops.selective_scan_interface"
COMBINED = "mamba_ssm.ops.triton.ssd_combined"
ROUNDING = 1e-6
"""Of fp32 sums over some ten tokens, in the package's reference functions."""

SHORT = [dataclasses.replace(case, seq_len=40) for case in GRID]  # longer ones take selective_scan_ref's backward, quadratic, too long
PLAIN = [dataclasses.replace(case, documents=False, initial=False) for case in SHORT]
BY_CHANNEL = [case for case in PLAIN if case.per_channel and case.structure != "none" and case.step_axis != "state"]
BY_HEAD = [
    dataclasses.replace(case, documents=documents, initial=initial)
    for case, documents, initial in itertools.product(SHORT, (False, True), (False, True))
    if case.structure in ("none", "head") and case.step_axis in (None, "shared")
]
SPECIAL = [
    dataclasses.replace(BY_CHANNEL[0], normalize=False),
    dataclasses.replace(BY_CHANNEL[0], one_rate=True, largest_rate=20.0),
    dataclasses.replace(BY_HEAD[-1], normalize=False),
    dataclasses.replace(BY_HEAD[-1], one_rate=True, seq_len=70),
    Case("channel", "channel", seq_len=3, batch=1, num_heads=2, state_size=520, head_dim=2, documents=False, initial=False),
]
RUNNABLE = [*BY_CHANNEL, *BY_HEAD, *SPECIAL]


@pytest.fixture
def loaded_anew():
    loaders = (mamba_ssm_backend._load_selective_scan, mamba_ssm_backend._load_chunk_scan)
    for load in loaders:
        load.cache_clear()
    yield
    for load in loaders:
        load.cache_clear()


@pytest.fixture
def as_on_gpu(monkeypatch, loaded_anew):
    """The backend takes the CPU for a GPU; what has been logged once is logged again, and seen by caplog."""
    monkeypatch.setattr(mamba_ssm_backend, "on_gpu", lambda problem: True)
    monkeypatch.setattr(get_logger("megahedge"), "propagate", True)
    log_once.cache_clear()


@pytest.fixture
def references(monkeypatch, as_on_gpu):
    """The package, its CUDA functions replaced by its reference functions; calls by the name of the function."""
    calls = []
    interface, combined = import_or_skip(monkeypatch, INTERFACE), import_or_skip(monkeypatch, COMBINED)
    minimal = import_or_skip(monkeypatch, "mamba_ssm.modules.ssd_minimal").ssd_minimal_discrete

    def selective_scan(u, delta, A, B, C, return_last_state=False):
        calls.append("selective_scan_fn")
        check_selective_scan(u, delta, A, B, C)
        y, last = interface.selective_scan_ref(u, delta, A, B, C, return_last_state=True)
        return (y, last.detach()) if return_last_state else y  # the CUDA function has no gradient of the last state

    def chunk_scan(x, dt, A, B, C, chunk_size, initial_states=None, seq_idx=None, return_final_states=False):
        calls.append("mamba_chunk_scan_combined")
        check_chunk_scan(x, dt, A, B, C, initial_states, seq_idx)
        y, last = by_document(minimal, x, dt, A, B, C, initial_states, seq_idx)
        if initial_states is None and seq_idx is None:  # the function's own reference knows neither, nor the last state
            x, dt, B, C = map(filled_up, (x, dt, B, C))
            y = combined.ssd_chunk_scan_combined_ref(x, dt, A, B, C, 8)[:, : y.shape[1]]
        return (y, last) if return_final_states else y

    monkeypatch.setattr(interface, "selective_scan_fn", selective_scan)
    monkeypatch.setattr(combined, "mamba_chunk_scan_combined", chunk_scan)
    return calls


def check_selective_scan(u, delta, A, B, C):
    """What csrc/selective_scan/selective_scan.cpp checks."""
    (batch, dim, seq_len), (groups, state_size) = u.shape, B.shape[1:3]
    assert {x.dtype for x in (u, delta, A, B, C)} == {torch.float32}
    assert delta.shape == u.shape and A.shape == (dim, state_size) and state_size <= 256
    assert B.shape == C.shape == (batch, groups, state_size, seq_len) and dim % groups == 0
    assert all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (u, delta, A, B, C))


def check_chunk_scan(x, dt, A, B, C, initial_states, seq_idx):
    """What _mamba_chunk_scan_combined_fwd checks."""
    batch, seq_len, heads, head_dim = x.shape
    assert dt.shape == (batch, seq_len, heads) and A.shape == (heads,)
    assert B.shape == C.shape and B.shape[:2] == (batch, seq_len) and heads % B.shape[2] == 0
    assert initial_states is None or initial_states.shape == (batch, heads, head_dim, B.shape[-1])
    assert seq_idx is None or (seq_idx.shape == (batch, seq_len) and seq_idx.dtype == torch.int32)


def by_document(minimal, x, dt, A, B, C, initial_states, seq_idx):
    """ssd_minimal_discrete document by document; as in the Triton kernels, initial states are those of document 0."""
    y, last = [], []
    for sequence in range(x.shape[0]):
        numbers = torch.zeros(x.shape[1]) if seq_idx is None else seq_idx[sequence]
        parts, state = [], None
        for number in numbers.unique():
            inside = numbers == number
            pieces = (tensor[sequence : sequence + 1, inside] for tensor in (x * dt.unsqueeze(-1), A * dt, B, C))
            start = initial_states[sequence][None, None] if number == 0 and initial_states is not None else None
            part, state = minimal(*map(filled_up, pieces), 8, initial_states=start)
            parts.append(part[:, : inside.sum()])
        y.append(torch.cat(parts, dim=1))
        last.append(state)
    return torch.cat(y), torch.cat(last)


def filled_up(x):
    """[b, t, ...] with zeros up to a multiple of 8, the size of the references' chunks."""
    return pad(x.flatten(2), (0, 0, 0, -x.shape[1] % 8)).unflatten(2, x.shape[2:])


@pytest.mark.parametrize("case", RUNNABLE, ids=lambda case: f"{case_id(case)}-n{case.state_size}-{case.documents:d}{case.initial:d}")
def test_mapping_equals_the_reference_with_all_gradients(references, case):
    results = run_backend("mamba_ssm", case, torch.float32)
    expected = run_backend("reference", case, torch.float32)
    assert_close(results, {name: x.double() for name, x in expected.items()}, ROUNDING)
    assert set(references) == {"selective_scan_fn" if case in BY_CHANNEL or case.per_channel else "mamba_chunk_scan_combined"}


@pytest.mark.parametrize("case", [*PLAIN, *SHORT], ids=case_id)
def test_every_other_scan_is_refused(references, case):
    assert (case.refusal_of("mamba_ssm") is None) == (case in RUNNABLE)


def test_what_it_refuses_for_a_decay_by_channel_auto_runs_by_another(references):
    case = Case("channel", "channel", seq_len=9, initial=False)
    tensors, boundaries = inputs(case)
    tensors = {name: x.float() for name, x in tensors.items()}
    y, state = scan(**tensors, boundaries=boundaries)
    assert torch.equal(y, scan(**tensors, boundaries=boundaries, backend=other_than_mamba(case))[0])
    with pytest.raises(InputError, match=r"'mamba_ssm' cannot run .* resets no state at boundaries; use auto, "):
        scan(**tensors, boundaries=boundaries, backend="mamba_ssm")
    with pytest.raises(InputError, match="starts from no initial state"):
        scan(**tensors, initial_state=state, backend="mamba_ssm")
    with pytest.raises(InputError, match="its states are fp32"):
        scan(**{name: x.double() for name, x in tensors.items()}, backend="mamba_ssm")


def test_auto_takes_it_where_it_runs(references, caplog):
    tensors = {name: x.float() for name, x in inputs(BY_CHANNEL[0])[0].items()}
    scan(**tensors)
    assert any(message.endswith("backend mamba_ssm") for message in caplog.messages)


def test_a_state_of_more_than_256_is_cut(references):
    run_backend("mamba_ssm", SPECIAL[-1], torch.float32)
    pieces, with_denominator, with_gradient_of_the_last_state = 3, 2, 2
    assert len(references) == 1 + pieces * with_denominator * with_gradient_of_the_last_state  # the first to see that it works


def test_a_cpu_is_refused_before_anything_is_imported(monkeypatch, loaded_anew):
    monkeypatch.setattr(mamba_ssm_backend, "_working", None)
    assert {case.refusal_of("mamba_ssm") for case in GRID} == {"it runs on GPUs only"}


@pytest.fixture(params=BREAKS)
def broken(request, monkeypatch, tmp_path, as_on_gpu):
    functions = {INTERFACE: "selective_scan_fn", COMBINED: "mamba_chunk_scan_combined"}
    contents = {module: BREAKS[request.param].replace("{function}", function) for module, function in functions.items()}
    install_fake(monkeypatch, tmp_path, "mamba_ssm", contents)


PLAIN_HEAD = Case("head", "shared", seq_len=9, documents=False, initial=False)
PLAIN_CHANNEL = Case("channel", "channel", seq_len=9, documents=False, initial=False)


@pytest.mark.parametrize("case", (PLAIN_HEAD, PLAIN_CHANNEL), ids=case_id)
def test_without_a_package_that_works_auto_warns_once_and_the_name_is_refused(broken, caplog, case):
    tensors = {name: x.float() for name, x in inputs(case)[0].items()}
    expected = scan(**tensors, backend=other_than_mamba(case))[0]
    for _ in range(2):
        assert torch.equal(scan(**tensors)[0], expected)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and warnings[0].startswith("the faster scan backend mamba_ssm is left out: mamba-ssm "), warnings
    with pytest.raises(InputError, match=r"'mamba_ssm' cannot run .*: mamba-ssm .*Error.*--force-reinstall mamba-ssm; use auto, "):
        scan(**tensors, backend="mamba_ssm")


def test_where_it_is_not_installed_nothing_is_warned_of(monkeypatch, as_on_gpu, caplog):
    uninstall(monkeypatch, "mamba_ssm")
    scan(**{name: x.float() for name, x in inputs(PLAIN_HEAD)[0].items()})
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    reason = PLAIN_HEAD.refusal_of("mamba_ssm")
    assert not isinstance(reason, Broken) and reason.endswith("pip install mamba-ssm")


def other_than_mamba(case):
    return next(name for name in BACKENDS if name != "mamba_ssm" and case.runnable_by(name))
