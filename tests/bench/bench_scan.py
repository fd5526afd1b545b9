"""Every scan backend on every structure against causal softmax attention of the same shape: time and peak memory.

python -m tests.bench.bench_scan [--seq_lens 1024 8192 --backends auto chunked --structures none head]
"""

# b batch, t seq_len, h num_heads, n state_size, p head_dim

import dataclasses
import functools
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor

from megahedge.kernels import BACKENDS, scan
from megahedge.utils.cli import parse_options, run_main
from megahedge.utils.errors import InputError
from tests.bench.measure import Work, interleaved_seconds, machine, median_ratio, peak_bytes, print_table

STRUCTURES = {
    "none": (None, ()),
    "head": ("shared", ("head",)),
    "state": ("shared", ("head", "state")),
    "state, step by state": ("state", ("head", "state")),
    "channel": ("channel", ("head", "state", "channel")),
    "channel, step by state": ("state", ("head", "state", "channel")),
}
"""By name: what the step varies over, and the axes of the rate."""
BASELINE = "softmax attention"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchScanOptions:
    """tests/bench/bench_scan.py"""

    batch: int = 2
    """Sequences."""
    num_heads: int = 12
    """Heads."""
    seq_lens: tuple[int, ...] = (1024,)
    """Tokens a sequence."""
    head_dim: int = 64
    """Channels of a head; features are twice as many."""
    dtype: str = "fp32"
    """Of C, B, V and of q, k, v: fp32 or bf16."""
    backends: tuple[str, ...] = ("auto",)
    """Backends of the scan, auto or any of reference, loop, numba, chunked; those that cannot run a structure are left out."""
    structures: tuple[str, ...] = tuple(STRUCTURES)
    """Structures of the decay: none, head, state, channel, or in quotes "state, step by state" and "channel, step by state"."""
    rounds: int = 7
    """Timed rounds, each of which runs everything once."""
    memory: bool = True
    """Measure peak memory too."""

    def __post_init__(self):
        unknown = [name for name in self.structures if name not in STRUCTURES]
        if unknown:
            raise InputError(f"--structures has {unknown[0]!r}; it may hold {', '.join(map(repr, STRUCTURES))}")


@dataclasses.dataclass(frozen=True)
class Case:
    """A scan, or with `structure` None softmax attention."""

    options: BenchScanOptions
    seq_len: int
    structure: str | None = None
    backend: str = "auto"

    @property
    def name(self) -> str:
        return BASELINE if self.structure is None else f"{self.structure} ({self.backend})"

    def inputs(self) -> tuple[Tensor, ...]:
        """Leaves with gradients: C, B, V, then step and rate where there are any; or q, k, v [b, h, t, p]."""
        torch.manual_seed(0)
        options, p = self.options, self.options.head_dim
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
        b, t, h, n = options.batch, self.seq_len, options.num_heads, 2 * p
        if self.structure is None:
            tensors = [torch.randn(b, h, t, p, dtype=dtype) for _ in range(3)]
        else:
            step_axis, rate_axes = STRUCTURES[self.structure]
            sizes = {"head": h, "state": n, "channel": p, "shared": 1}
            C, B = (torch.randn(b, t, h, n).softmax(-1).to(dtype) for _ in range(2))
            tensors = [C, B, torch.randn(b, t, h, p, dtype=dtype)]
            if step_axis is not None:
                step = F.softplus(torch.randn(b, t, h, sizes[step_axis]))
                tensors += [step, torch.rand([sizes[axis] for axis in rate_axes])]
        return tuple(tensor.to(DEVICE).requires_grad_() for tensor in tensors)

    def output(self, inputs: tuple[Tensor, ...]) -> Tensor:
        if self.structure is None:
            return F.scaled_dot_product_attention(*inputs, is_causal=True)
        return scan(*inputs, backend=self.backend)[0]

    def forward(self) -> Work:
        """The work of a forward without gradients."""
        inputs = self.inputs()
        return torch.no_grad()(lambda: self.output(inputs))

    def training(self) -> Work:
        """The work of a forward and its backward, which has been run once."""
        inputs = self.inputs()
        slope = torch.randn_like(self.output(inputs))

        def work():
            return torch.autograd.grad(self.output(inputs), inputs, slope)

        work()
        return work

    def memory(self) -> tuple[float, float]:
        """Bytes beyond inputs, output and gradients at the peak of a training step, and the bytes of the inputs."""
        held = sum(tensor.nbytes for tensor in self.inputs())
        output = self.inputs()[2].nbytes
        return peak_bytes(self.training) - held - output, held


def cases(options: BenchScanOptions, seq_len: int) -> list[Case]:
    """Softmax attention first, then each backend on each structure that it can run."""
    found = [Case(options, seq_len)]
    for structure in options.structures:
        for backend in options.backends:
            case = Case(options, seq_len, structure, backend)
            try:
                Case(dataclasses.replace(options, batch=1), 1, structure, backend).training()
            except InputError:
                continue
            found.append(case)
    return found


def row(case: Case, forward: dict, training: dict) -> list[str]:
    """One line of the table."""
    times = (forward, training)
    line = [case.name, str(case.seq_len)]
    line += [f"{1e3 * statistics.median(seconds[case.name]):.1f}" for seconds in times]
    line += [f"{median_ratio(seconds[case.name], seconds[BASELINE]):.2f}" for seconds in times]
    if case.options.memory:
        beyond, held = case.memory()
        line += [f"{beyond / 2**20:.0f}", f"{beyond / held:.2f}"]
    return line


def main() -> None:
    """Entry point."""
    options = parse_options(BenchScanOptions, prog="bench_scan.py", description="Scans against causal softmax attention.")
    unknown = [name for name in options.backends if name not in ("auto", *BACKENDS)]
    if unknown:
        raise InputError(f"--backends has {unknown[0]!r}; it may hold auto, {', '.join(BACKENDS)}")
    header = ["scan (backend)", "t", "fwd ms", "fwd+bwd ms", "fwd ×", "fwd+bwd ×"]
    if options.memory:
        header += ["MiB beyond", "× inputs"]
    rows = []
    for seq_len in options.seq_lens:
        found = cases(options, seq_len)
        forward = interleaved_seconds({case.name: case.forward() for case in found}, options.rounds)
        training = interleaved_seconds({case.name: case.training() for case in found}, options.rounds)
        rows += map(functools.partial(row, forward=forward, training=training), found)
    print(f"{machine()}; b {options.batch}, h {options.num_heads}, p {options.head_dim}, n {2 * options.head_dim}, {options.dtype}")
    print("× : against softmax attention in the same rounds.  Beyond: at the peak, beyond inputs, output and gradients.")
    print_table(header, rows)


if __name__ == "__main__":
    run_main(main)
