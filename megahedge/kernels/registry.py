"""The backends of the scan, and which of them runs a problem."""

from megahedge.kernels import chunked, loop, mamba_ssm_backend, numba_backend, reference, triton_backend
from megahedge.kernels.choosing import choose
from megahedge.kernels.problem import Backend, Problem

_FASTEST_FIRST = (
    triton_backend.BACKEND,
    mamba_ssm_backend.BACKEND,
    chunked.BACKEND,
    numba_backend.BACKEND,
    loop.BACKEND,
    reference.BACKEND,
)
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _FASTEST_FIRST}
"""By name, the fastest first: `auto` takes the first that accepts the problem."""


def choose_backend(name: str, problem: Problem) -> Backend:
    """The backend of that name; for `auto` the first of BACKENDS that accepts the problem, logged once per kind of problem.

    Raises InputError if there is no backend of that name, or if it cannot run the problem, with its reason.
    """
    return choose("scan", BACKENDS, name, problem)
