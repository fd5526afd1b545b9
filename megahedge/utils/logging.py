"""Log lines that come once per job, not once per rank."""

import functools
import logging
import os
import sys


def global_rank() -> int:
    """Rank of this process in the job, from the launcher's environment; 0 where there is no launcher."""
    return int(os.environ.get("RANK", 0))


def get_logger(name: str) -> logging.Logger:
    """A logger below `megahedge` that prints on rank 0; warnings and errors print on every rank, with their rank."""
    _configure()
    return logging.getLogger(name if name.startswith("megahedge") else f"megahedge.{name}")


@functools.cache
def _configure() -> None:
    handler = logging.StreamHandler(sys.stderr)
    prefix = "" if int(os.environ.get("WORLD_SIZE", 1)) == 1 else f"[rank {global_rank()}] "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(levelname)s %(message)s", "%H:%M:%S"))
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
    if os.environ.get("LOCAL_RANK", "0") == "0":
        log_once(logger, level, message)


@functools.cache
def log_once(logger: logging.Logger, level: int, message: str) -> None:
    """Log `message` the first time that this process meets it."""
    logger.log(level, message)
