"""Times as ratios measured side by side, and peak memory."""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

Work = Callable[[], object]


def interleaved_seconds(works: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Seconds of each piece of work in each of `rounds` rounds, after one round that is not counted.

    A round runs every piece once, so that what else happens on the machine hits all of them alike: compare within a round.
    """
    seconds = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            start = _now()
            work()
            elapsed = _now() - start
            if number:
                seconds[name].append(elapsed)
    return seconds


def median_ratio(seconds: Sequence[float], baseline: Sequence[float]) -> float:
    """Median over the rounds of the time against the baseline's in the same round."""
    return statistics.median(mine / other for mine, other in zip(seconds, baseline, strict=True))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes(make: Callable[[], Work]) -> int:
    """Most memory that `make()()` holds at one moment beyond what `make` has left behind.

    make: of module level; it builds the inputs and runs the work once, so that caches are filled, and returns the work.
    On a CPU by the peak of resident memory of a process of its own (Linux), on a GPU by torch's count.
    """
    if torch.cuda.is_available():
        return _peak_of_gpu(make())
    # Freed blocks go back to the system at once, or what an earlier step has left would hide what the next one takes.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(1 << 16)
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(_peak_of_process, (make,))
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"], os.environ["MALLOC_TRIM_THRESHOLD_"]


def _peak_of_gpu(work: Work) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_of_process(make: Callable[[], Work]) -> int:
    return peak_of(make())


def peak_of(work: Work) -> int:
    """Most memory that `work()` takes in this process beyond what it held before (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is held now
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as what they hold, the first one set left."""
    texts = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in texts) for column in range(len(header))]
    for row in texts:
        padded = [cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(padded))


def machine() -> str:
    """What the figures were measured on."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"
