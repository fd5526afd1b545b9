"""The backends of the causal convolution, and which of them runs a problem."""

from megahedge.kernels import causal_conv1d_backend, torch_conv
from megahedge.kernels.choosing import choose
from megahedge.kernels.conv_problem import ConvBackend, ConvProblem

CONV_BACKENDS: dict[str, ConvBackend] = {backend.name: backend for backend in (causal_conv1d_backend.BACKEND, torch_conv.BACKEND)}
"""By name, the fastest first: `auto` takes the first that accepts the problem."""


def choose_conv_backend(name: str, problem: ConvProblem) -> ConvBackend:
    """The backend of that name; for `auto` the first of CONV_BACKENDS that accepts the problem, logged once per kind of problem.

    Raises InputError if there is no backend of that name, or if it cannot run the problem, with its reason.
    """
    return choose("convolution", CONV_BACKENDS, name, problem)
