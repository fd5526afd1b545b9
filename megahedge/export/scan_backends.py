"""The scans that an exported model carries along, in place of megahedge.kernels.registry: those that need torch alone."""

from megahedge.kernels.chunked import BACKEND as CHUNKED
from megahedge.kernels.loop import BACKEND as LOOP
from megahedge.kernels.problem import Backend, Problem
from megahedge.kernels.reference import BACKEND as REFERENCE

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (CHUNKED, LOOP, REFERENCE)}
"""By name, the fastest first."""


def choose_backend(name: str, problem: Problem) -> Backend:
    """The backend of that name; for `auto` the first that accepts the problem.  Raises ValueError if there is none."""
    for backend in BACKENDS.values():
        if name in ("auto", backend.name) and backend.supports(problem) is None:
            return backend
    raise ValueError(f"no scan backend '{name}' runs {problem}; use auto, or one of {', '.join(BACKENDS)}")
