"""Optional packages: one that is missing is no fault, one that is installed and does not import is."""

import importlib.metadata


class Broken(str):
    """Why a package that is installed cannot be imported: a reason like any other, but one that somebody will want to know of."""


def import_fault(package: str, error: Exception) -> str:
    """Why an optional package could not be imported, in one line; a Broken where it is installed all the same.

    package: its name for pip.  error: whatever the import raised, of a broken wheel anything.
    """
    reason = f"{package} cannot be imported ({_told(error)}); pip install "
    return Broken(f"{reason}--force-reinstall {package}") if is_installed(package) else f"{reason}{package}"


def call_fault(package: str, error: Exception) -> Broken:
    """Why an optional package that can be imported does not work, in one line.

    package: its name for pip.  error: what a call raised, such as for a symbol that its binary lacks or a GPU that it was not built for.
    """
    return Broken(f"{package} does not work ({_told(error)}); pip install --force-reinstall {package}")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def is_installed(package: str) -> bool:
    """Whether pip knows the package, which says nothing of whether it works."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
