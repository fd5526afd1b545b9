"""The compiled backend beside what all backends promise: optional, threaded as torch is, and honest about what is not finite."""

import subprocess
import sys

import pytest
import torch

from megahedge.kernels import numba_backend, scan
from megahedge.utils.errors import InputError
from megahedge.utils.logging import log_once
from tests.kernels.problems import Case, inputs

CASE = Case("channel", "channel", seq_len=9, documents=False, initial=False)


def arguments(dtype=torch.float32):
    return {name: x.to(dtype) for name, x in inputs(CASE)[0].items()}


@pytest.fixture
def no_numba(monkeypatch):
    numba_backend.load_sweeps.cache_clear()
    monkeypatch.delattr("megahedge.kernels.numba_sweeps", raising=False)
    monkeypatch.setitem(sys.modules, "megahedge.kernels.numba_sweeps", None)
    yield
    numba_backend.load_sweeps.cache_clear()


def test_without_numba_auto_takes_another_backend_and_the_name_is_refused(no_numba, caplog):
    tensors = arguments()
    log_once.cache_clear()
    assert torch.equal(scan(**tensors)[0], scan(**tensors, backend="loop")[0])
    assert any("faster scan backend numba is left out" in text for text in caplog.messages)  # it is installed, and broken
    with pytest.raises(InputError, match=r"'numba' cannot run .*pip install --force-reinstall numba; use auto, loop or reference"):
        scan(**tensors, backend="numba")


@pytest.mark.parametrize("name", ("C", "B", "V", "step", "rate"))
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_what_is_not_finite_stays_so(name, value):
    tensors = {key: x.requires_grad_() for key, x in arguments().items()}
    with torch.no_grad():
        tensors[name].view(-1)[0] = value
    y, _ = scan(**tensors, backend="numba")
    expected, _ = scan(**tensors, backend="loop")
    assert torch.equal(y.isfinite(), expected.isfinite())
    y.sum().backward()
    grads = [x.grad.isfinite().all() for x in tensors.values()]
    for x in tensors.values():
        x.grad = None
    expected.sum().backward()
    assert grads == [x.grad.isfinite().all() for x in tensors.values()]


def test_its_threads_are_as_many_as_those_of_torch():
    numba = pytest.importorskip("numba")
    before = torch.get_num_threads()
    try:
        for threads in range(1, min(2, numba.config.NUMBA_NUM_THREADS) + 1):
            torch.set_num_threads(threads)
            scan(**arguments(), backend="numba")
            assert numba.get_num_threads() == torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_its_first_call_leaves_torch_its_threads():
    """In a process of its own, since numba's threads start once."""
    code = (
        "import torch; from megahedge.kernels import scan; torch.set_num_threads(1); x = torch.ones(1, 2, 1, 2); "
        "scan(x, x, x, x, torch.ones(1, 2, 2), step_axis='channel', backend='numba'); print(torch.get_num_threads())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout.strip() == "1", shown.stderr
