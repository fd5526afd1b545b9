"""Log lines that come once per job, not once per rank."""

import functools
import logging
import sys

from megahedge.utils.launcher import global_rank, is_first_on_node, rank_prefix


def get_logger(name: str) -> logging.Logger:
    """A logger below `megahedge` that prints on rank 0; warnings and errors print on every rank, with their rank."""
    _configure()
    return logging.getLogger(name if name.startswith("megahedge") else f"megahedge.{name}")


@functools.cache
def _configure() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {rank_prefix()}%(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger("megahedge")
    root.addHandler(handler)
    root.propagate = False
    root.setLevel(logging.INFO if global_rank() == 0 else logging.WARNING)


def log_agreed(logger: logging.Logger, level: int, message: str, *arguments) -> None:
    """Log an event that every rank knows of, once per job."""
    if global_rank() == 0:
        logger.log(level, message, *arguments)


def log_once_a_node(logger: logging.Logger, level: int, message: str) -> None:
    """`log_once` on the first rank of each node, for what is likely to be so for all ranks there."""
    if is_first_on_node():
        log_once(logger, level, message)


@functools.cache
def log_once(logger: logging.Logger, level: int, message: str) -> None:
    """Log `message` the first time that this process meets it."""
    logger.log(level, message)
