"""The exceptions that a user is meant to read."""

import contextlib
from collections.abc import Iterable, Iterator


class InputError(ValueError):
    """A bad option, config or input file.  The message names the option, its value and what would work.

    Command-line entry points print it as one line and exit with status 2 (`megahedge.utils.cli.run_main`);
    any other exception is a fault of ours and keeps its traceback.
    """


class RunError(RuntimeError):
    """A run that cannot go on although its inputs were valid, such as a loss that stays NaN.

    Printed as one line; exit status 1.
    """


@contextlib.contextmanager
def blamed_on(option: str) -> Iterator[None]:
    """Put the option that gave it before the message of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"--{option}: {error}") from error


def check_known(option: str, value: str, known: Iterable[str]) -> None:
    """Raise InputError where the value of an option is none of those that there are."""
    if value not in known:
        raise InputError(f"--{option}={value} is not known; use one of {', '.join(known)}")
