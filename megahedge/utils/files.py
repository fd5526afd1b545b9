"""Files that are either whole or absent: atomic writes, digests, locks between processes of one machine."""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from pathlib import Path

from megahedge.utils.errors import InputError

_TEMPORARY = ".tmp"


def fsync_path(path: str | os.PathLike) -> None:
    """Flush a file or a directory entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "wb"):
    """Open a temporary file beside `path`; on a clean exit fsync it and rename it over `path`, else remove it.

    Text is UTF-8.  The temporary name is random: processes of two nodes on one file system may have the same pid.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}{_TEMPORARY}")
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporary_files(folder: str | os.PathLike) -> None:
    """Remove what killed `atomic_write`s have left in a folder.  Nobody may be writing there."""
    for path in Path(folder).glob(f".*{_TEMPORARY}"):
        path.unlink(missing_ok=True)


def is_temporary_file(path: Path) -> bool:
    """Whether an `atomic_write` made this file and was killed, or is at it."""
    return path.name.startswith(".") and path.name.endswith(_TEMPORARY)


def write_json(path: str | os.PathLike, value: object) -> None:
    """Write `value` as indented JSON, atomically."""
    with atomic_write(path, "w") as handle:
        json.dump(value, handle, indent=2, sort_keys=False)
        handle.write("\n")


def read_json(path: str | os.PathLike) -> object:
    """The value in a JSON file."""
    with open(path, encoding="utf-8") as handle:
        return json.load(handle)


def read_json_object(path: str | os.PathLike) -> dict:
    """The object in a JSON file that a user gave.  Raises InputError if the file is damaged or holds something else."""
    try:
        value = read_json(path)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged: a JSON object is expected")
    return value


def apply_umask(path: str | os.PathLike) -> None:
    """Give a file the permissions that open() would have given it: safetensors leaves its files readable by their owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)


def sha256_file(path: str | os.PathLike) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextlib.contextmanager
def file_lock(path: str | os.PathLike, *, blocking: bool = True):
    """Hold an exclusive advisory lock on `path` (made if missing); freed by the kernel if the process dies.

    Raises BlockingIOError when `blocking` is false and another process holds it.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        yield
