"""The backends of the scan, and which of them runs a problem."""

import logging

from megahedge.kernels import chunked, loop, numba_backend, reference, triton_backend
from megahedge.kernels.problem import Backend, Problem
from megahedge.utils.errors import InputError
from megahedge.utils.logging import get_logger, log_once, log_once_a_node
from megahedge.utils.packages import Broken
from megahedge.utils.words import either

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (triton_backend.BACKEND, chunked.BACKEND, numba_backend.BACKEND, loop.BACKEND, reference.BACKEND)
}
"""By name, the fastest first: `auto` takes the first that accepts the problem."""


def _fastest(problem: Problem) -> Backend:
    """The first that accepts the problem; where broken packages are why it is not an earlier one, that is told, too."""
    logger = get_logger("kernels")
    for backend in BACKENDS.values():
        reason = backend.supports(problem)
        if reason is None:
            log_once(logger, logging.INFO, f"scan with {problem}: backend {backend.name}")
            return backend
        if isinstance(reason, Broken):
            log_once_a_node(logger, logging.WARNING, f"the faster scan backend {backend.name} is left out: {reason}")
    raise AssertionError(f"no backend runs {problem}")  # the reference runs everything


def choose_backend(name: str, problem: Problem) -> Backend:
    """The backend of that name; for `auto` the first of BACKENDS that accepts the problem, logged once per kind of problem.

    Raises InputError if there is no backend of that name, or if it cannot run the problem, with its reason.
    """
    if name == "auto":
        return _fastest(problem)
    if name not in BACKENDS:
        raise InputError(f"there is no scan backend '{name}'; use {either(['auto', *BACKENDS])}")
    reason = BACKENDS[name].supports(problem)
    if reason is not None:
        able = [other.name for other in BACKENDS.values() if other.supports(problem) is None]
        raise InputError(f"scan backend '{name}' cannot run {problem}: {reason}; use {either(['auto', *able])}")
    return BACKENDS[name]
