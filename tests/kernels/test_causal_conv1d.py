"""The convolution on causal-conv1d: the mapping, by the package's own reference in place of its CUDA function, and broken packages."""

import itertools

import pytest
import torch
from torch.nn.functional import pad

from megahedge.kernels import CONV_BACKENDS, causal_conv, causal_conv1d_backend
from megahedge.kernels.conv_problem import ConvProblem
from megahedge.utils.errors import InputError
from megahedge.utils.logging import get_logger, log_once
from tests.kernels.foreign import BREAKS, import_or_skip, install_fake, uninstall


def example(seq_len=9, num_taps=4, *, bias=True, initial=False, boundaries=False, dtype=torch.float32, channels=8):
    """Arguments of causal_conv by name; those that are floating-point want gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, seq_len, channels), "weight": (channels, num_taps)}
    shapes |= {"bias": (channels,)} if bias else {}
    shapes |= {"initial": (2, num_taps - 1, channels)} if initial else {}
    found = {name: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for name, shape in shapes.items()}
    if boundaries:
        found["boundaries"] = torch.rand(2, seq_len, generator=generator) < 0.3
        found["boundaries"][0, 0] = True
    return found


def outcome(arguments, backend):
    """Both results and the gradients of a random linear function of them."""
    results = causal_conv(**arguments, backend=backend)
    generator = torch.Generator().manual_seed(1)
    total = sum((x * torch.randn(x.shape, generator=generator).to(x.dtype)).sum() for x in results)
    return [*results, *torch.autograd.grad(total, [x for x in arguments.values() if x.is_floating_point()])]


@pytest.fixture
def as_on_gpu(monkeypatch):
    """The backend takes the CPU for a GPU; what has been logged once is logged again, and seen by caplog."""
    monkeypatch.setattr(causal_conv1d_backend, "on_gpu", lambda problem: True)
    monkeypatch.setattr(get_logger("megahedge"), "propagate", True)
    log_once.cache_clear()
    causal_conv1d_backend.load.cache_clear()
    yield
    causal_conv1d_backend.load.cache_clear()


@pytest.fixture
def reference(monkeypatch, as_on_gpu):
    """The package, its CUDA function replaced by its reference function, with what the CUDA code checks."""
    package = import_or_skip(monkeypatch, "causal_conv1d")
    causal_conv1d_ref = import_or_skip(monkeypatch, "causal_conv1d.causal_conv1d_interface").causal_conv1d_ref

    def causal_conv1d(x, weight, bias=None, seq_idx=None, initial_states=None):
        batch, dim, seq_len = x.shape
        assert x.stride(1) == 1 and x.stride(2) > 1 and all(n % 8 == 0 for n in (dim, x.stride(0), x.stride(2)))
        assert weight.shape[0] == dim and 2 <= weight.shape[1] <= 4 and (bias is None or bias.dtype == weight.dtype)
        assert seq_idx is None or (seq_idx.shape == (batch, seq_len) and seq_idx.dtype == torch.int32 and seq_idx.is_contiguous())
        assert initial_states is None or (initial_states.dtype == x.dtype and initial_states.stride(1) == 1)
        assert seq_idx is None or initial_states is None  # versions differ in what they do
        return causal_conv1d_ref(x, weight, bias, initial_states, seq_idx=seq_idx)

    monkeypatch.setattr(package, "causal_conv1d_fn", causal_conv1d)


KINDS = [kind for kind in itertools.product((False, True), repeat=3) if kind[1:] != (True, True)]


@pytest.mark.parametrize(("bias", "initial", "boundaries"), KINDS)
@pytest.mark.parametrize("num_taps", (2, 3, 4))
@pytest.mark.parametrize("seq_len", (1, 2, 33))
def test_mapping_equals_the_torch_backend_with_all_gradients(reference, seq_len, num_taps, bias, initial, boundaries):
    arguments = example(seq_len, num_taps, bias=bias, initial=initial, boundaries=boundaries)
    results, expected = outcome(arguments, "causal_conv1d"), outcome(arguments, "torch")
    assert torch.equal(results[1], expected[1])
    for x, wanted in zip(results, expected, strict=True):
        # fp32 sums of up to 4 terms; of 2 * 33 in the gradients of weights
        assert x.shape == wanted.shape and (x - wanted).norm() <= 1e-6 * wanted.norm().clamp_min(0.1)


def test_channels_that_do_not_lie_side_by_side_are_moved(reference):
    arguments = example()
    arguments["x"] = arguments["x"].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.testing.assert_close(outcome(arguments, "causal_conv1d"), outcome(arguments, "torch"))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_identity_taps_give_back_the_input_bit_for_bit(reference, dtype):
    arguments = example(boundaries=True, dtype=dtype) | {"weight": pad(torch.ones(8, 1), (3, 0)), "bias": torch.zeros(8)}
    y, _ = causal_conv(**arguments, backend="causal_conv1d")
    assert y.dtype == dtype and torch.equal(y, arguments["x"])


REFUSED = {
    "takes fp32, fp16 and bf16": {"dtype": torch.float64},
    "2, 3 or 4 taps": {"num_taps": 5},
    "multiples of 8, not 12": {"channels": 12},
    "initial inputs together with boundaries": {"initial": True, "boundaries": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_do_auto_leaves_to_torch(reference, reason):
    arguments = example(**REFUSED[reason])
    assert all(map(torch.equal, outcome(arguments, "auto"), outcome(arguments, "torch")))
    with pytest.raises(InputError, match=f"convolution backend 'causal_conv1d' cannot run .*{reason}; use auto or torch"):
        causal_conv(**arguments, backend="causal_conv1d")


def test_auto_takes_it_where_it_runs_and_says_so_once(reference, caplog):
    caplog.set_level("INFO")
    for _ in range(2):
        causal_conv(**example())
    assert caplog.messages == ["convolution with 4 taps, float32 on cpu: backend causal_conv1d"]


def test_a_cpu_takes_torch_without_importing_anything(monkeypatch):
    monkeypatch.setattr(causal_conv1d_backend, "load", None)
    reasons = [backend.supports(ConvProblem(4, 8, "cpu", torch.float32, False, False)) for backend in CONV_BACKENDS.values()]
    assert reasons == ["it runs on GPUs only", "it runs on GPUs only", None]


def test_an_unknown_name_is_refused():
    with pytest.raises(InputError, match="there is no convolution backend 'cudnn'; use auto, causal_conv1d, triton or torch"):
        causal_conv(**example(), backend="cudnn")


@pytest.fixture(params=BREAKS)
def broken(request, monkeypatch, tmp_path, as_on_gpu):
    source = BREAKS[request.param].replace("{function}", "causal_conv1d_fn")
    install_fake(monkeypatch, tmp_path, "causal_conv1d", {"causal_conv1d.interface": source})
    (tmp_path / "causal_conv1d" / "__init__.py").write_text("from causal_conv1d.interface import causal_conv1d_fn\n")


def test_without_a_package_that_works_auto_warns_once_and_the_name_is_refused(broken, caplog):
    arguments = example()
    expected = outcome(arguments, "torch")
    for _ in range(2):
        assert all(map(torch.equal, outcome(arguments, "auto"), expected))
    causal_conv(**example(num_taps=3))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1, warnings
    assert warnings[0].startswith("the faster convolution backend causal_conv1d is left out: causal-conv1d ")
    with pytest.raises(
        InputError, match=r"'causal_conv1d' cannot run .*: causal-conv1d .*Error.*--force-reinstall causal-conv1d; use auto or"
    ):
        causal_conv(**arguments, backend="causal_conv1d")


def test_where_it_is_not_installed_nothing_is_warned_of(monkeypatch, as_on_gpu, caplog):
    uninstall(monkeypatch, "causal_conv1d")
    causal_conv(**example())
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    with pytest.raises(InputError, match="pip install causal-conv1d; use"):
        causal_conv(**example(), backend="causal_conv1d")
