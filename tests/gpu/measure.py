"""`python -m tests.gpu.measure`: the Triton scans on a GPU, first whether they are right, then how long they take; some minutes.

Right: outputs, last state and every gradient against the reference in fp64.  Time: forward and backward of one layer at the shapes of
Pythia models, against the chunked backend in torch, causal attention (SDPA) and what `python -m tests.gpu.roofline` expects of an H100;
and of what stands around a scan, the convolution and the feature maps' softmax, by each that can do it.
"""

# b batch, t seq_len

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megahedge.kernels import BACKENDS, CONV_BACKENDS, causal_conv, features, scan, signed_softmax
from megahedge.kernels.conv_problem import ConvProblem
from megahedge.utils.errors import InputError
from tests.gpu.configurations import CONFIGURATIONS, HEAD_DIMS, Configuration, run_both_ways
from tests.gpu.roofline import MODELS, Model

FP32, BF16 = 1e-5, 2e-2
"""Relative error by norm: of rounding alone, and where operands and outputs have 8 bits."""


def errors(configuration: Configuration, head_dim: int, device: str, backend: str, seq_len: int) -> dict[str, float]:
    """Relative error by norm of every result, by name."""
    torch.manual_seed(0)
    arguments = configuration.inputs(head_dim, batch=2, seq_len=seq_len, heads=2, device=device)
    exact = {
        name: x.detach().double().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in arguments.items()
    }
    found, expected = (_results(given, which) for given, which in ((arguments, backend), (exact, "reference")))
    return {name: float((found[name].double() - x).norm() / x.norm().clamp_min(0.1)) for name, x in expected.items()}


def _results(arguments: dict, backend: str) -> dict[str, torch.Tensor]:
    y, state = run_both_ways(arguments, backend)
    leaves = {f"grad {name}": x.grad for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    return {"y": y.detach(), "state": state.numerator.detach()} | leaves


def print_errors(device: str, backend: str, head_dims: tuple[int, ...], seq_len: int) -> bool:
    """One line each; whether all are within their limits."""
    print("\n| configuration | head_dim | largest error | of | limit |\n|---|---|---|---|---|")
    sound = True
    for head_dim in head_dims:
        for configuration in CONFIGURATIONS:
            name, error = max(errors(configuration, head_dim, device, backend, seq_len).items(), key=lambda item: item[1])
            limit = FP32 if configuration.dtype == torch.float32 else BF16
            sound &= error <= limit
            mark = "" if error <= limit else " **too large**"
            print(f"| {configuration} | {head_dim} | {error:.1e}{mark} | {name} | {limit:.0e} |", flush=True)
    return sound


def seconds(action: Callable[[], object], device: str, repeats: int) -> float:
    """Median of `repeats` calls after two that warm up."""
    times = []
    for _ in range(repeats + 2):
        start = _now(device)
        action()
        times.append(_now(device) - start)
    return sorted(times[2:])[repeats // 2]


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def print_times(device: str, backends: list[str], models: tuple[Model, ...], batch: int, seq_len: int, repeats: int) -> None:
    """One layer of each model, in microseconds a token, and peak memory beyond the inputs."""
    print("\n| model | configuration | backend | us/token/layer | / SDPA | MiB beyond inputs |\n|---|---|---|---|---|---|")
    for model in models:
        sizes = {"batch": batch, "seq_len": seq_len, "heads": model.heads, "device": device}
        attention = seconds(lambda model=model: _attention(model, batch, seq_len, device), device, repeats)
        for configuration in CONFIGURATIONS:
            arguments = configuration.inputs(model.head_dim, **sizes)
            for backend in backends:
                try:
                    scan(**{name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}, backend=backend)
                except InputError:
                    continue
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                taken = seconds(lambda given=arguments, which=backend: run_both_ways(given, which), device, repeats)
                memory = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}" if device == "cuda" else ""
                each = taken / (batch * seq_len) * 1e6
                print(f"| {model.name} | {configuration} | {backend} | {each:.3f} | {taken / attention:.2f} | {memory} |", flush=True)


def print_times_around(device: str, models: tuple[Model, ...], batch: int, seq_len: int, repeats: int) -> None:
    """Forward and backward of one layer of each model, in microseconds a token: by Triton, by torch, by packages where they are."""
    print("\n| model | what | by | us/token/layer |\n|---|---|---|---|")
    for model in models:
        width = model.heads * model.head_dim
        x = torch.randn(batch, seq_len, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(width, 4, device=device, requires_grad=True)
        mapped = torch.randn(batch, seq_len, model.heads, model.head_dim, device=device, requires_grad=True)
        problem = ConvProblem(4, width, device, x.dtype, boundaries=False, initial=False)
        actions = {
            ("convolution", name): lambda x=x, weight=weight, name=name: causal_conv(x, weight, backend=name)[0]
            for name, backend in CONV_BACKENDS.items()
            if backend.supports(problem) is None
        }
        actions["feature map's softmax", "torch"] = lambda mapped=mapped: features._by_torch(mapped)
        if features._kernels_run(device, model.head_dim):
            actions["feature map's softmax", "triton"] = lambda mapped=mapped: signed_softmax(mapped, stored=torch.bfloat16)
        for (what, name), action in actions.items():
            taken = seconds(lambda action=action: action().sum().backward(), device, repeats)
            print(f"| {model.name} | {what} | {name} | {taken / (batch * seq_len) * 1e6:.4f} |", flush=True)


def _attention(model: Model, batch: int, seq_len: int, device: str) -> None:
    q, k, v = (torch.randn(batch, model.heads, seq_len, model.head_dim, device=device, dtype=torch.bfloat16) for _ in range(3))
    q.requires_grad_()
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="triton", help="the one whose results are looked at")
    parser.add_argument("--head_dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--seq_len", type=int, default=200, help="of the comparison with the reference")
    parser.add_argument("--models", nargs="*", default=[model.name for model in MODELS], help="whose layers are timed")
    parser.add_argument("--timed_seq_len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: no GPU is here; --device cpu --backend chunked tries the program itself", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name() if options.device == "cuda" else "CPU", f"torch {torch.__version__}", sep=", ")
    sound = print_errors(options.device, options.backend, tuple(options.head_dims), options.seq_len)
    models = tuple(model for model in MODELS if model.name in options.models)
    backends = [name for name in BACKENDS if name not in ("reference", "loop")]
    print_times(options.device, backends, models, options.batch, options.timed_seq_len, options.repeats)
    print_times_around(options.device, models, options.batch, options.timed_seq_len, options.repeats)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
