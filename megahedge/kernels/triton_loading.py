"""Whether Triton, which is optional, can run kernels on a device, and whether they can be trusted there."""

import functools
import importlib
import os
from collections.abc import Callable
from types import ModuleType

from megahedge.utils.packages import Broken, import_fault

GPU_ONLY = "it runs on GPUs only"


def interpreting() -> bool:
    """Whether Triton runs its kernels in Python, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def load(name: str) -> ModuleType | str:
    """A module of megahedge.kernels that imports Triton, or why it cannot: its kernels are compiled at their first call."""
    try:
        return importlib.import_module(f"megahedge.kernels.{name}")
    except Exception as error:  # whatever a broken wheel raises
        return import_fault("triton", error)


def refusal(device: str, *modules: str) -> str | None:
    """Why kernels of these modules cannot run on a type of device; None where they can."""
    if device != "cuda" and not interpreting():
        return GPU_ONLY
    return next((found for found in map(load, modules) if isinstance(found, str)), None)


def fault_of(check: Callable[[], str | None]) -> Broken | None:
    """What is wrong with kernels on this GPU by a check of them, which may raise whatever a compiler or a driver raises."""
    try:
        fault = check()
    except Exception as error:
        fault = f"its kernels do not run on this GPU ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
    return None if fault is None else Broken(fault)
