"""The operators that DeepSpeed compiles at its first start: where they are kept, and who may compile them.

Kept in the virtual environment: a cache that several environments share is compiled anew whenever another of them had it last.
torch's lock there is a file that exists: a process that is killed while it compiles leaves it behind, and every later start would
wait for it for ever, in silence.
"""

import os
import sys
import sysconfig
import time
from pathlib import Path

from megahedge.utils.logging import get_logger

logger = get_logger(__name__)

STALE_SECONDS = 300
"""Age from which a lock that nobody here holds is taken for abandoned; a build takes about a minute, also on another host."""


def prepare_op_builds() -> None:
    """Settle where operators are kept, wait for builds by others, and tell of the one to come."""
    _settle_root()
    _prefer_own_ninja()
    await_op_builds()
    if not is_anything_built():
        logger.info("DeepSpeed compiles a communication helper at its first start in an environment, for about a minute")


def _settle_root() -> None:
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))


def is_anything_built() -> bool:
    """Whether an earlier start in this environment has compiled what DeepSpeed needs."""
    _settle_root()
    return any(_root().glob("**/*.so"))


def _prefer_own_ninja() -> None:
    """One ninja for all starts, whether or not the environment is activated: another version takes the operators for unbuilt."""
    scripts = sysconfig.get_path("scripts")
    if (Path(scripts) / "ninja").is_file() and os.environ.get("PATH", "").split(os.pathsep)[0] != scripts:
        os.environ["PATH"] = os.pathsep.join([scripts, *filter(None, [os.environ.get("PATH")])])


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


def _root() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def _locks() -> list[Path]:
    root = _root()
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
