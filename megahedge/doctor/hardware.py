"""GPUs, processors and memory of this machine."""

import os
import platform
from pathlib import Path

import torch

from megahedge.config.options import RunOptions
from megahedge.config.published import known_gpu
from megahedge.doctor.report import Section
from megahedge.training.distributed import SHARED_MEMORY, check_device, missing_shared_memory, num_local_ranks
from megahedge.utils.files import free_bytes
from megahedge.utils.units import format_bytes


def look_at_hardware(section: Section, options: RunOptions) -> None:
    """What there is to compute with."""
    section.attempt("GPU", check_device)
    gpus = [_look_at_gpu(section, number, options) for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if not gpus:
        section.row("GPU", "none: training takes the processors")
    processors, local_ranks = available_processors(), num_local_ranks()
    threads = os.environ.get("OMP_NUM_THREADS")
    section.row("processors", f"{processors} of {os.cpu_count()} ({_model_name()})")
    section.row("OMP_NUM_THREADS", f"{threads or 'not set'}; torch uses {torch.get_num_threads()} threads a process")
    if local_ranks > 1 and local_ranks * torch.get_num_threads() > processors:
        section.warnings.append(
            f"{local_ranks} processes of {torch.get_num_threads()} threads share {processors} processors and get in each other's way; set "
            f"OMP_NUM_THREADS={max(1, processors // local_ranks)}"
        )
    available, total = memory_bytes()
    section.row("memory", f"{format_bytes(available)} available of {format_bytes(total)}")
    shared = _look_at_shared_memory(section, local_ranks)
    section.figures |= {"gpus": gpus, "processors": processors, "threads": torch.get_num_threads(), "shared_memory_free": shared}
    section.figures |= {"memory_available": available, "memory_total": total}


def _look_at_gpu(section: Section, number: int, options: RunOptions) -> dict:
    name = torch.cuda.get_device_name(number)
    capability = ".".join(map(str, torch.cuda.get_device_capability(number)))
    free, total = torch.cuda.mem_get_info(number)
    gpu = known_gpu(name)
    peak = gpu and gpu.peak_tflops(options.dtype)
    told = f"peak {peak:g} TFLOP/s in {options.dtype}" if gpu else "peak not known: `mfu` needs --peak_tflops"
    section.row(f"GPU {number}", f"{name}, {format_bytes(free)} free of {format_bytes(total)}, compute capability {capability}, {told}")
    if options.dtype == "bf16" and torch.cuda.get_device_capability(number) < (8, 0):
        section.warnings.append(f"GPU {number} ({name}) has no units for bf16, which it computes slowly; consider --dtype fp32")
    return {"name": name, "memory_free": free, "memory_total": total, "compute_capability": capability, "peak_tflops": peak}


def available_processors() -> int:
    """Those that this process may use, which a scheduler may have cut."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> tuple[int, int]:
    """Available and in all, of the machine or of the container that the process is in."""
    values = {}
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        name, value = line.split(":")
        values[name] = int(value.split()[0]) << 10
    available, total = values["MemAvailable"], values["MemTotal"]
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    if limit is None or limit >= total:
        return available, total
    return min(available, limit - (_number(Path("/sys/fs/cgroup/memory.current")) or 0)), limit


def _number(path: Path) -> int | None:
    """In a file of the kernel's; None where there is none, or the word `max`."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _model_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _look_at_shared_memory(section: Section, processes: int) -> int | None:
    free = free_bytes(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    section.row(str(SHARED_MEMORY), "is not there" if free is None else f"{format_bytes(free)} free")
    shortage = missing_shared_memory(max(2, processes))
    if shortage is not None:
        section.warnings.append(shortage)
    return free
