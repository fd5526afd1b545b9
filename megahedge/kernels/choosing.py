"""Which backend of a registry runs a problem: the one asked for by name, or the fastest that can."""

import logging
from collections.abc import Mapping

from megahedge.utils.errors import InputError
from megahedge.utils.logging import get_logger, log_once, log_once_a_node
from megahedge.utils.packages import Broken
from megahedge.utils.words import either


def choose(kind: str, backends: Mapping, name: str, problem):
    """The backend of that name; for `auto` the first that accepts the problem, logged once per kind of problem.

    kind: what they run, for messages.  backends: by name, the fastest first, the last one runs everything; each has a
    `supports(problem)`, which is None, or the reason why it cannot run the problem.
    Raises InputError if there is no backend of that name, or if it cannot run the problem, with its reason.
    """
    if name == "auto":
        return _fastest(kind, backends, problem)
    if name not in backends:
        raise InputError(f"there is no {kind} backend '{name}'; use {either(['auto', *backends])}")
    reason = backends[name].supports(problem)
    if reason is not None:
        able = [other for other, backend in backends.items() if backend.supports(problem) is None]
        raise InputError(f"{kind} backend '{name}' cannot run {problem}: {reason}; use {either(['auto', *able])}")
    return backends[name]


def _fastest(kind: str, backends: Mapping, problem):
    """The first that accepts the problem; where broken packages are why it is not an earlier one, that is told, too."""
    logger = get_logger("kernels")
    for name, backend in backends.items():
        reason = backend.supports(problem)
        if reason is None:
            log_once(logger, logging.INFO, f"{kind} with {problem}: backend {name}")
            return backend
        if isinstance(reason, Broken):
            log_once_a_node(logger, logging.WARNING, f"the faster {kind} backend {name} is left out: {reason}")
    raise AssertionError(f"no {kind} backend runs {problem}")
