"""Locks on the operators that DeepSpeed compiles at its first start.

torch's lock there is a file that exists: a process that is killed while it compiles leaves it behind, and every later start would
wait for it for ever, in silence.
"""

import os
import time
from pathlib import Path

from megahedge.utils.logging import get_logger

logger = get_logger(__name__)

STALE_SECONDS = 300
"""Age from which a lock that nobody here holds is taken for abandoned; a build takes about a minute, also on another host."""


def await_op_builds(stale_seconds: float = STALE_SECONDS) -> None:
    """Return when no build is under way; locks without an owner are removed, with a warning."""
    for lock in _locks():
        told = False
        while lock.exists():
            if not _is_held(lock) and _age(lock) > stale_seconds:
                logger.warning("%s was left behind by a killed process; it is removed", lock)
                lock.unlink(missing_ok=True)
                break
            if not told:
                logger.info("waiting for the build of %s by another process", lock.parent.name)
                told = True
            time.sleep(0.2)


def _locks() -> list[Path]:
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_held(lock: Path) -> bool:
    """Whether a process of this machine that we may look into has the file open, as torch has while it builds."""
    name = str(lock.resolve())
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) == name:
                return True
        except OSError:  # gone meanwhile, or another user's
            continue
    return False
