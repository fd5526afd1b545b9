"""The backends of the causal convolution, and which of them runs a problem."""

from megahedge.kernels import causal_conv1d_backend, torch_conv, triton_conv_backend
from megahedge.kernels.choosing import choose
from megahedge.kernels.conv_problem import ConvBackend, ConvProblem

_FASTEST_FIRST = (causal_conv1d_backend.BACKEND, triton_conv_backend.BACKEND, torch_conv.BACKEND)
CONV_BACKENDS: dict[str, ConvBackend] = {backend.name: backend for backend in _FASTEST_FIRST}
"""By name, the fastest first: `auto` takes the first that accepts the problem."""


def choose_conv_backend(name: str, problem: ConvProblem) -> ConvBackend:
    """The backend of that name; for `auto` the first of CONV_BACKENDS that accepts the problem, logged once per kind of problem.

    Raises InputError if there is no backend of that name, or if it cannot run the problem, with its reason.
    """
    return choose("convolution", CONV_BACKENDS, name, problem)
