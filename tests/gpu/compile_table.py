"""`python -m tests.gpu.compile_table`: compile every Triton kernel in every configuration, and print what it takes of a GPU.

No GPU is needed.  Slots are instructions of the loop over tokens for each state and token; products are tensor core instructions in all.
"""

import argparse
import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from megahedge.kernels import triton_loading
from tests.gpu.compiled import Launch, Needs, compiled, noted_launches
from tests.gpu.configurations import CONFIGURATIONS, HEAD_DIMS, Configuration, run_around, run_both_ways

_SIZES = {"batch": 2, "seq_len": 1024, "heads": 8}


def launches_of(configuration: Configuration, head_dim: int, capability: int) -> list[Launch]:
    """Each kernel that a scan and its backward launch on a GPU of that compute capability, once."""
    with as_on_gpu(capability) as launches:
        run_both_ways(configuration.inputs(head_dim, **_SIZES), "triton")
    return launches


def launches_around(head_dim: int) -> list[Launch]:
    """Each kernel of the convolution and of the feature map's softmax."""
    with as_on_gpu(90) as launches:  # they are the same everywhere
        run_around(head_dim, **_SIZES)
    return launches


@contextlib.contextmanager
def as_on_gpu(capability: int) -> Iterator[list[Launch]]:
    """Within `with`, Triton's kernels are said to run where tensors have no memory, and are noted."""
    from megahedge.kernels import triton_channel, triton_chunks

    with contextlib.ExitStack() as patches:
        launches = patches.enter_context(noted_launches())
        patches.enter_context(mock.patch.object(triton_loading, "interpreting", return_value=True))
        for launcher in (triton_channel, triton_chunks):
            patches.enter_context(mock.patch.object(launcher, "capability_of", return_value=capability))
        yield launches


def slots(launch: Launch, needs: Needs) -> float | None:
    """Instructions for each state and token, where a loop goes from token to token."""
    sizes = dict(launch.constants)
    if "BLOCK_N" not in sizes or "T" in sizes or not needs.loops:
        return None
    states = sizes["BLOCK_N"] * sizes["BLOCK_P"] / (32 * launch.warps)
    loops = [loop.total() for loop in needs.loops if loop["MUFU"] >= states]
    return min(loops) / states if loops else None


def rows(configurations: list[Configuration], head_dims: list[int], capabilities: list[int]) -> Iterator[str]:
    """Lines of the table, each launch once."""
    seen = set()
    yield "| kernel | configuration | head_dim | architecture | registers | stack | shared memory | slots | products |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for head_dim in head_dims:
        for what in (*configurations, "around the scan"):
            for capability in capabilities:
                scans = isinstance(what, Configuration)
                for launch in launches_of(what, head_dim, capability) if scans else launches_around(head_dim):
                    if (launch, capability) in seen:
                        continue
                    seen.add((launch, capability))
                    needs = compiled(launch, capability)
                    each = slots(launch, needs)
                    cells = (_name(launch), what, head_dim, f"sm_{capability}", needs.registers, needs.stack, needs.shared)
                    yield "| " + " | ".join(map(str, (*cells, f"{each:.1f}" if each else "", needs.products or ""))) + " |"


def _name(launch: Launch) -> str:
    return f"{launch.name}, reverse" if dict(launch.constants).get("REVERSE") else launch.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head_dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--capabilities", type=int, nargs="+", default=(80, 90, 100))
    parser.add_argument("--configurations", nargs="+", choices=[*map(str, CONFIGURATIONS)], default=[*map(str, CONFIGURATIONS)])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    configurations = [each for each in CONFIGURATIONS if str(each) in arguments.configurations]
    for line in rows(configurations, arguments.head_dims, arguments.capabilities):
        print(line, flush=True)


if __name__ == "__main__":
    main()
