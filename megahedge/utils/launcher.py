"""Numbers that a launcher puts into the environment: those of the job, its ranks and its port."""

import os

from megahedge.utils.errors import InputError


def launcher_number(name: str, default: int | None = None) -> int:
    """The number in a variable, `default` where it is not set.  Raises InputError for a value that is none."""
    if name not in os.environ and default is not None:
        return default
    number = told_number(name)
    if number is None:
        given = f"the environment says {name}={os.environ.get(name)!r}, which is no number"
        raise InputError(f"{given}; unset it, or start with the deepspeed launcher or torchrun")
    return number


def told_number(name: str) -> int | None:
    """The number in a variable; None where it holds none, for what must not fail before `launcher_number` can say so."""
    value = os.environ.get(name, "")
    try:
        return int(value) if value.isdecimal() else None  # int alone takes signs and white space
    except ValueError:  # thousands of digits
        return None


def global_rank() -> int:
    """Rank of this process in the job; 0 where there is no launcher."""
    return told_number("RANK") or 0


def is_first_on_node() -> bool:
    """Whether this process is the first of its node, as one without a launcher is."""
    return not told_number("LOCAL_RANK")


def rank_prefix() -> str:
    """What stands before a line that one rank of several prints; nothing in a job of one."""
    return "" if told_number("WORLD_SIZE") in (None, 0, 1) else f"[rank {global_rank()}] "
