"""`python -m tests.gpu.roofline`: what the Triton scans should cost on an H100, told from counts of instructions, operations and bytes.

No GPU is needed, and nothing here is measured but instructions of the machine code; the efficiencies are judgement, to be replaced by
measurements (`python -m tests.gpu.measure`).  Per kernel the slower of arithmetic and memory counts.
"""

# per token of one head: n states, p channels, T tokens of a chunk

import argparse
import dataclasses

import torch

from megahedge.kernels.tiles import chunk_tile
from tests.gpu.compile_table import launches_of, slots
from tests.gpu.compiled import compiled
from tests.gpu.configurations import CONFIGURATIONS


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of a GPU by its data sheet."""

    name: str
    slots: float
    """Instructions of single lanes a second: SMs x 128 lanes x clock."""
    products: float
    """Operations of bf16 matrix products a second, dense."""
    memory: float
    """Bytes a second."""


H100 = Chip("H100 SXM", slots=132 * 128 * 1.755e9, products=989e12, memory=3.35e12)
ISSUE, PRODUCTS, MEMORY = 0.6, 0.4, 0.8
"""Shares of the peaks that kernels like these reach: judgement."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A Pythia model; `utilisation` is the share of the peak that its dense layers reach, judgement again."""

    name: str
    layers: int
    heads: int
    head_dim: int
    parameters: float
    """That multiply each token, the head's among them."""
    utilisation: float

    def dense_seconds(self, chip: Chip) -> float:
        """Of a training step, for each token, without the mixers' scans."""
        return 6 * self.parameters / (chip.products * self.utilisation)


MODELS = (
    Model("160M", 12, 12, 64, 123.6e6, 0.35),
    Model("410M", 24, 16, 64, 353.8e6, 0.40),
    Model("1B", 16, 8, 256, 908.7e6, 0.47),
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Operations of matrix products and bytes from and to memory, for each token of a head."""

    name: str
    operations: float
    bytes: float

    def seconds(self, chip: Chip) -> float:
        return max(self.operations / (chip.products * PRODUCTS), self.bytes / (chip.memory * MEMORY))


def chunk_kernels(head_dim: int, *, feature_bytes: int, decays: bool, cached: bool = False) -> list[Kernel]:
    """Forward and backward of the scan by chunks with V in bf16; what tiles read again comes from the L2 cache and is not counted.

    Gradients of features have as many bytes as features.  States go to memory, and come from there, too, unless `cached`: a launch takes
    as many sequences as leave theirs in the cache for the next kernel.
    """
    n, p = 2 * head_dim, head_dim
    tile = chunk_tile(n, p, torch.bfloat16, 90)
    T, tiles_n, tiles_p = tile.tokens, -(-n // tile.states_of_features), -(-p // tile.channels)
    features, row, states = feature_bytes * n, 2 * p, 2 * n * p / T
    again = 0.0 if cached else states
    state_product, pairs, mixed = 2 * n * p, 2 * T * n, 2 * T * p
    walk = Kernel("walk", state_product, features + row + states)
    of_features = 2 * state_product + tiles_n * mixed + (3 if decays else 2) * pairs
    return [
        walk,
        Kernel("outputs", state_product + tiles_p * pairs + mixed, 2 * features + 2 * row + again),
        walk,  # again, in the backward
        Kernel("walk, reverse", state_product, features + row + states),
        Kernel("gradients_of_features", of_features, 4 * features + 2 * row + 2 * again),
        Kernel("gradients_of_values", state_product + tiles_p * pairs + mixed, 2 * features + 2 * row + again),
    ]


def map_kernels(head_dim: int, *, fused: bool) -> list[Kernel]:
    """The softmax of both feature maps and its backward, of fp32: `fused` by one kernel each way, with features of bf16.

    Else by torch, which negates, concatenates and takes the softmax, each through memory, and the same back.
    """
    p = head_dim
    each = (4 * p + 4 * p, 4 * p + 4 * p + 4 * p) if fused else (8 * p + 16 * p + 16 * p, 24 * p + 8 * p + 12 * p)
    return [Kernel("features", 0.0, 2 * each[0]), Kernel("gradient", 0.0, 2 * each[1])]


def channel_slots(head_dim: int) -> dict[str, float]:
    """Instructions for each state and token of the kernels by channel, from their machine code."""
    return {launch.name: slots(launch, compiled(launch, 90)) for launch in launches_of(CONFIGURATIONS[0], head_dim, 90)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(f"{H100.name}: {H100.slots / 1e12:.1f}T lane slots/s at {ISSUE}, {H100.products / 1e12:.0f}T at {PRODUCTS}, ", end="")
    print(f"{H100.memory / 1e12:.2f}T bytes/s at {MEMORY}; training, per token")
    print("| model | dense us | scan | scan us | of dense | states cached | tokens/s | feature maps by torch, us | by Triton, us |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in MODELS:
        dense, heads = model.dense_seconds(H100), model.heads * model.layers
        each = channel_slots(model.head_dim)
        states = 2 * model.head_dim**2
        maps = [heads * sum(kernel.seconds(H100) for kernel in map_kernels(model.head_dim, fused=fused)) for fused in (False, True)]
        _print(model, "channel", dense, heads * states * sum(each.values()) / (H100.slots * ISSUE), None, maps)
        for feature_bytes, decays in ((4, False), (2, False), (2, True)):
            name = f"{'head' if decays else 'none'}, features of {feature_bytes} bytes"
            scan, cached = (
                heads * sum(kernel.seconds(H100) for kernel in kernels)
                for kernels in (
                    chunk_kernels(model.head_dim, feature_bytes=feature_bytes, decays=decays, cached=cached) for cached in (False, True)
                )
            )
            _print(model, name, dense, scan, cached, maps)


def _print(model: Model, name: str, dense: float, scan: float, cached: float | None, maps: list[float]) -> None:
    of_cached = "" if cached is None else f"{cached / dense:.2f}"
    cells = (f"{dense * 1e6:.2f}", name, f"{scan * 1e6:.2f}", f"{scan / dense:.2f}", of_cached, f"{1 / (dense + scan):.0f}")
    by_torch, by_triton = (f"{taken * 1e6:.2f}" for taken in maps)
    print("| " + " | ".join((model.name, *cells, by_torch, "" if "4 bytes" in name or name == "channel" else by_triton)) + " |", flush=True)


if __name__ == "__main__":
    main()
