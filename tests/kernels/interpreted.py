"""`TRITON_INTERPRET=1 python -m tests.kernels.interpreted NAME`: scans of one kind by Triton kernels run in Python, against the oracle.

A process of its own, since Triton decides when the kernels are imported whether it interprets or compiles them.
"""

import contextlib
import dataclasses
import sys
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from megahedge.config.mixer import MixerConfig
from megahedge.config.model import ModelConfig
from megahedge.kernels import (
    causal_conv,
    features,
    signed_softmax,
    triton_backend,
    triton_channel,
    triton_chunks,
    triton_conv,
    triton_conv_backend,
    triton_features,
    triton_loading,
)
from megahedge.kernels.triton_check import find_fault
from megahedge.models.language_model import LanguageModel
from tests.kernels.problems import Case, assert_close, inputs, run_backend, run_oracle
from tests.models.small import random_tokens, randomize, small_config

FP32 = 1e-5
"""By norm; seen are 1e-6 and less."""
BF16 = 2e-2
"""Operands of 8 bits, and y is rounded to as many."""


def _sized(structure, step_axis, seq_len, state_size, head_dim=None, **changes):
    sizes = {"seq_len": seq_len, "state_size": state_size, "head_dim": head_dim or state_size // 2, "batch": 1, "num_heads": 1}
    return Case(structure, step_axis, **sizes | changes)


LARGE = ((19, 64, 32), (19, 128, 64), (5, 160, 80), (5, 512, 32))
"""Tokens, state size and head_dim.  512 states by 256 channels are a hundred tiles, which the interpreter takes minutes for."""


GROUPS = {
    "channel": [
        Case("channel", "channel", seq_len=67, batch=1, state_size=8, head_dim=4),
        Case("channel", "state", seq_len=35, state_size=8, head_dim=4, num_heads=1),
        Case("channel", None, batch=1, seq_len=33, state_size=6, head_dim=5, one_rate=True, initial=False),
        Case("channel", "shared", batch=1, seq_len=33, state_size=6, head_dim=5, normalize=False, largest_rate=30.0),
        Case("head", "channel", batch=1, seq_len=33, state_size=6, head_dim=5, documents=False),
        Case("state", "channel", seq_len=1, state_size=6, head_dim=5),
    ],
    "channel-sizes": [
        _sized("channel", "channel", 17, 64, largest_rate=20.0),
        _sized("channel", "channel", 5, 128),
        _sized("channel", "channel", 3, 160),
        _sized("channel", "state", 2, 512),
    ],
    "none": [
        Case("none", None, seq_len=67, state_size=20, head_dim=5, num_heads=1),
        Case("none", "shared", seq_len=35, state_size=16, head_dim=16, normalize=False),
        Case("none", "state", seq_len=35, state_size=20, head_dim=5, documents=False),
        Case("none", "channel", seq_len=35, state_size=20, head_dim=5),
        Case("none", "channel", seq_len=1, state_size=20, head_dim=5, normalize=False),
        *(_sized("none", None, *sizes) for sizes in (*LARGE, (19, 32, 256))),
    ],
    "head": [
        Case("head", "shared", seq_len=67, state_size=20, head_dim=5, num_heads=1),
        Case("head", None, seq_len=35, state_size=20, head_dim=5, largest_rate=5.0, one_rate=True),
        Case("head", "shared", seq_len=35, state_size=16, head_dim=16, normalize=False, initial=False, documents=False, largest_rate=30.0),
        Case("head", "shared", seq_len=2, state_size=16, head_dim=16),
        *(_sized("head", "shared", *sizes, largest_rate=5.0) for sizes in LARGE),
    ],
    "state": [
        Case("state", "state", seq_len=35, state_size=20, head_dim=5, num_heads=1),
        Case("state", "shared", batch=1, seq_len=17, state_size=16, head_dim=16, one_rate=True),
        Case("state", None, seq_len=19, state_size=16, head_dim=16, largest_rate=5.0, num_heads=1, initial=False),
        Case("state", "state", seq_len=19, state_size=16, head_dim=16, largest_rate=30.0, num_heads=1, normalize=False),
        Case("head", "state", batch=1, seq_len=17, state_size=20, head_dim=5, normalize=False, documents=False),
        *(_sized("state", "state", *sizes, largest_rate=5.0) for sizes in LARGE),
    ],
    "slices": [  # see main
        Case("head", "shared", seq_len=35, batch=3, num_heads=1, state_size=16, head_dim=16),
        Case("state", "state", seq_len=17, batch=2, num_heads=1, state_size=16, head_dim=16, documents=False),
        Case("channel", "channel", seq_len=9, batch=3, num_heads=1, state_size=8, head_dim=4),
    ],
    "16-bits": [],  # see _check_16_bits
    "check": [],  # see _check_the_checks
    "convolution": [],  # see _check_the_convolution
    "features": [],  # see _check_features
    "model": [],  # see _check_a_model
}


def _check_16_bits() -> None:
    """V in bf16 and fp16, features in fp32 and bf16: y and gradients have the dtype of theirs, states and what else is fp32 stay fp32."""
    none, head, state, channel, by_state = (
        ("none", None),
        ("head", "shared"),
        ("state", "state"),
        ("channel", "channel"),
        ("channel", "state"),
    )
    bf16, fp16 = torch.bfloat16, torch.float16
    kinds = [(kind, bf16, 70 if kind == head else 19, "V") for kind in (head, state, channel)]  # chunks of bf16 have 64 tokens
    kinds += [(kind, bf16, 19, "CBV") for kind in (none, head, state, by_state)] + [(kind, fp16, 19, "V") for kind in (none, channel)]
    with mock.patch.object(triton_backend, "_interpretable", lambda inputs: inputs), _products_of_bf16():
        for kind, dtype, seq_len, narrow in kinds:
            case = Case(*kind, seq_len=seq_len, batch=1, state_size=32, head_dim=16)
            rounded = {name: x.to(dtype).double() if name in narrow else x for name, x in inputs(case)[0].items()}
            results = run_backend("triton", case, torch.float32, tensors=rounded, dtypes=dict.fromkeys(narrow, dtype))
            of_dtype = {"y", *(f"grad {name}" for name in narrow)}
            assert all(x.dtype == (dtype if name in of_dtype else torch.float32) for name, x in results.items())
            assert_close(results, run_backend("reference", case, tensors=rounded), BF16)


def _check_the_checks() -> None:
    """Sound kernels of every kind have no fault, and wrong ones have."""
    # the others are too slow here; a GPU compares them all before it is trusted
    assert find_fault(triton_backend.BACKEND, "none", None, "cpu") is None
    run = triton_backend.run

    def wrong(scan_inputs):
        y, *others = run(scan_inputs)
        return y * 1.01, *others

    fault = find_fault(dataclasses.replace(triton_backend.BACKEND, run=wrong), "none", None, "cpu")
    assert fault.startswith("on this GPU its output is off by 1.0e-02 of itself from what the backend chunked computes")

    assert triton_conv_backend.find_fault(triton_conv_backend.run, "cpu") is None
    fault = triton_conv_backend.find_fault(lambda conv_inputs: triton_conv_backend.run(conv_inputs) * 1.01, "cpu")
    assert fault == "on this GPU its output is off by 1.0e-02 of itself from what the backend torch computes"
    assert features.find_fault("cpu") is None
    with mock.patch.object(triton_features, "run", lambda x, dtype: torch.cat((x, -x), -1).mul(1.01).softmax(-1)):
        assert "the feature map's softmax is off" in features.find_fault("cpu")


def _check_the_convolution() -> None:
    """Against the torch backend in float64: taps, odd sizes, documents, what came before, with all gradients; and in bf16."""
    generator = torch.Generator().manual_seed(0)
    for taps, seq_len, channels, documents, before in (
        (4, 70, 72, True, True),
        (4, 33, 5, True, False),
        (3, 2, 64, False, True),
        (2, 64, 130, True, True),
        (1, 5, 8, True, True),
        (8, 3, 8, False, False),
    ):
        shapes = {"x": (2, seq_len, channels), "weight": (channels, taps), "bias": (channels,), "initial": (2, taps - 1, channels)}
        tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        if not before:
            del tensors["initial"], tensors["bias"]
        resets = torch.rand(2, seq_len, generator=generator) < 0.1 if documents else None
        for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, BF16)):
            results = []
            for backend, as_dtype in (("torch", torch.float64), ("triton", dtype)):
                leaves = {name: x.to(dtype).to(as_dtype).requires_grad_() for name, x in tensors.items()}
                y, last = causal_conv(**leaves, boundaries=resets, backend=backend)
                slopes = torch.autograd.grad((y.double().square().sum(), last.double().sum()), list(leaves.values()), allow_unused=True)
                assert y.dtype == as_dtype
                results.append([y, *(x for x in slopes if x is not None)])
            for x, expected in zip(results[1], results[0], strict=True):
                assert (x - expected).norm() <= limit * expected.norm(), (taps, dtype)
        x = torch.randn(2, seq_len, channels, generator=generator)
        identity = torch.zeros(channels, taps).index_fill(1, torch.tensor(taps - 1), 1.0)
        assert torch.equal(causal_conv(x, identity, boundaries=resets, backend="triton")[0], x)


def _check_features() -> None:
    """Odd widths, one row, large values, and bf16 only where it is asked for."""
    generator = torch.Generator().manual_seed(0)
    for shape, scale in (((3, 5, 80), 1.0), ((1, 1), 1.0), ((2, 7, 256), 30.0), ((1000, 3), 1e4)):
        x, slope = torch.randn(shape, generator=generator) * scale, torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)
        leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        y, expected = signed_softmax(leaf), torch.cat((wide, -wide), -1).softmax(-1)
        assert y.dtype == torch.float32 and y.grad_fn.name() == "_SignedSoftmaxBackward"
        (grad,), (grad_expected,) = torch.autograd.grad(y, leaf, slope), torch.autograd.grad(expected, wide, slope.double())
        # an exponent has an error of 2^-24 of itself, which may be as large as twice the scale
        limit = 1e-6 * max(1.0, scale)
        assert (y - expected).norm() <= limit * expected.norm()
        assert (grad - grad_expected).norm() <= limit * slope.norm()
        narrow = signed_softmax(leaf, stored=torch.bfloat16)
        # the interpreter cuts digits off where a GPU rounds, and does so wrongly below the smallest normal number, 1.2e-38
        assert narrow.dtype == torch.bfloat16 and (narrow - y).abs().le(y * 2.0**-7 + 1.2e-38).all()
        assert torch.autograd.grad(narrow, leaf, slope.bfloat16())[0].dtype == torch.float32
        assert signed_softmax(leaf, stored=torch.float16).dtype == torch.float32
    assert signed_softmax(torch.empty(0, 4)).shape == (0, 8)
    rows = torch.tensor([[1.0, torch.nan, 2.0], [1.0, torch.inf, 2.0], [2.5e38, 1.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(signed_softmax(rows), torch.cat((rows, -rows), -1).softmax(-1), equal_nan=True)  # what is no number stays so


def _check_a_model() -> None:
    """A model of one block, whose convolution, feature maps and scan all run by Triton, against the same in float64, which none does.

    In bf16, where features are of 16 bits, too, it is no further from that than without Triton, where they are fp32.
    """
    by_head = {"decay": "head", "decay_step": "head", "feature_map_per_head": True}
    for decay, launcher in (({}, triton_channel), (by_head, triton_chunks)):
        mixer = MixerConfig(kind="hedge_mamba", rope="before", **decay)  # rotated features bring normalisers near 0
        config = small_config(num_layers=1, num_heads=2, hidden_size=32, mixer=mixer)
        expected = _gradients(config, torch.float64)
        with contextlib.ExitStack() as patches:
            runs = [patches.enter_context(mock.patch.object(x, "run", wraps=x.run)) for x in (launcher, triton_conv, triton_features)]
            found = _gradients(config, torch.float32)
            assert all(run.called for run in runs), mixer
        assert (found - expected).norm() <= 1e-5 * expected.norm(), mixer  # fp32
        with mock.patch.object(triton_backend, "_interpretable", lambda inputs: inputs), _products_of_bf16():
            by_triton = _gradients(config, torch.bfloat16)
        with mock.patch.object(triton_loading, "interpreting", return_value=False):
            by_others = _gradients(config, torch.bfloat16)
        assert (by_triton - expected).norm() <= 1.1 * (by_others - expected).norm() <= 0.02 * expected.norm(), mixer


def _gradients(config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    """Of all parameters of a model, which are the same in each dtype but for rounding, side by side in float64."""
    model = randomize(LanguageModel(config).to(dtype))
    model(random_tokens(config.vocab_size, seq_len=9)).double().square().mean().backward()
    return torch.cat([x.grad.double().flatten() for x in model.parameters() if x.grad is not None])


def _products_of_bf16():
    """Within `with`, the interpreter multiplies bf16 as a GPU does, where that of Triton 3.7 takes its bits for whole numbers."""
    original = interpreter.InterpreterBuilder.create_dot

    def widened(operand):
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        data = (operand.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot(self, a, b, *others):
        return original(self, widened(a), widened(b), *others)

    return mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot)


def main() -> None:
    (name,) = sys.argv[1:]
    if name == "slices":  # one sequence at a time, as if it were a very long one
        triton_chunks._CACHED_BYTES = triton_channel._PROGRAMS = triton_channel._FEATURES = 1
    for case in GROUPS[name]:
        results = run_backend("triton", case, torch.float32)
        # the oracle's memory grows with seq_len^2
        assert_close(results, run_oracle(case) if case.state_size < 64 else run_backend("reference", case), FP32)
        print("ok", case, flush=True)
    checks = {
        "16-bits": _check_16_bits,
        "check": _check_the_checks,
        "convolution": _check_the_convolution,
        "features": _check_features,
        "model": _check_a_model,
    }
    if name in checks:
        checks[name]()


if __name__ == "__main__":
    main()
