"""Files that are either whole or absent: atomic writes, outputs checked before the work, digests, locks between processes."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

import yaml

from megahedge.utils.errors import InputError, RunError

_TEMPORARY = ".tmp"
_RANDOM = 12
"""Characters before it that make the name of a temporary file one of its own."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Of a file system that has no file locks, such as Lustre that is mounted without them."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES)
"""Of a disk that is full, fails or is not ours to write: for its user to mend."""


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
    temporary = _temporary_path(path)
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(_RANDOM // 2)}{_TEMPORARY}")


def remove_temporary_files(folder: str | os.PathLike, name: str = "") -> None:
    """Remove what killed `atomic_write`s have left in a folder, or of the file `name` in it.  Nobody may be writing there, or that file."""
    for path in Path(folder).glob(f".{glob.escape(name)}.{'?' * _RANDOM}{_TEMPORARY}" if name else f".*{_TEMPORARY}"):
        path.unlink(missing_ok=True)


def is_temporary_file(path: Path) -> bool:
    """Whether an `atomic_write` made this file and was killed, or is at it."""
    return path.name.startswith(".") and path.name.endswith(_TEMPORARY)


def check_output(option: str, value: str, *paths: str | os.PathLike, overwrite: bool) -> None:
    """Find out before the work whether the files of `--<option>=<value>` can be written; nothing is left behind.

    paths: the files that will be made; missing folders above them are, too.
    Raises InputError for an empty value, for a place where no file can be made, and unless `overwrite` for a file that exists.
    """
    if not value.strip():
        raise InputError(f"--{option}={value!r} is empty; say where to write")
    for path in map(Path, paths):
        fault = why_not_writable(path)
        if fault:
            raise InputError(f"--{option}={value} cannot be written: {fault}; choose another place")
        if not overwrite and path.exists():
            raise InputError(f"{path} exists already; choose another --{option}, or give --overwrite to replace it")


def check_output_folder(option: str, value: str) -> None:
    """The same of a folder that files will be put into, and that may be there with others."""
    if not value.strip():
        raise InputError(f"--{option}={value!r} is empty; name a folder")
    fault = why_not_writable(Path(value) / "file")
    if fault:
        raise InputError(f"--{option}={value} cannot be written to: {fault}; name a folder elsewhere")


def why_not_writable(path: Path) -> str | None:
    """Why `atomic_write` would fail, found out in the nearest folder above that exists; None if it would not."""
    if os.path.isdir(path):
        return f"{path} is a folder"
    if os.path.exists(path) and not os.path.isfile(path):
        return f"{path} is no ordinary file"  # a device, which a rename would replace
    temporary = _temporary_path(path).absolute()
    folder = nearest_folder(temporary)
    if not os.path.isdir(folder):
        return f"{folder} is not a folder"
    try:
        for name in (temporary, *(folder / part for part in temporary.relative_to(folder).parts)):
            with contextlib.suppress(FileNotFoundError):
                os.lstat(name)  # fails for a name, or a path, that is too long
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=_TEMPORARY):
            return None
    except OSError as error:
        return f"no such file can be made in {folder} ({error.strerror})"


def nearest_folder(path: Path) -> Path:
    """The path, or else the nearest above it, that exists; what is made there would lie on the same file system."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.lexists(parent))


def free_bytes(path: str | os.PathLike) -> int:
    """What is free on the file system on which the path lies, or would lie."""
    return shutil.disk_usage(nearest_folder(Path(path))).free


@contextlib.contextmanager
def disk_errors_explained(path: str | os.PathLike):
    """While `path` is written: a disk that is full or fails is the user's to mend, so it becomes a RunError of one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise RunError(f"cannot write {os.fspath(path)}: {error.strerror}") from None


@contextlib.contextmanager
def os_errors_told(path: str | os.PathLike):
    """While safetensors or tokenizers write `path`: their exceptions for a disk that is full or fails become the OSErrors that they are."""
    try:
        yield
    except Exception as error:
        found = None if isinstance(error, OSError) else _OS_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), os.fspath(path)) from error


@contextlib.contextmanager
def fresh_folder(folder: str | os.PathLike):
    """An empty folder of the same name, in another place, that takes the place of `folder` on a clean exit.

    Whatever happens, all of the old folder is there or all of the new one; after a kill between two renames the old one stands aside,
    and the next call puts it back before anything else.  The caller sees to it that nobody else writes the same folder.
    """
    folder = Path(folder).absolute()
    unfinished, old = _restore_folder(folder)
    new = unfinished / folder.name
    try:
        new.mkdir(parents=True)
        yield new
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        fsync_path(folder.parent)
    finally:
        _restore_folder(folder)


def _restore_folder(folder: Path) -> tuple[Path, Path]:
    """Put back what was put aside for a folder that has not come, and remove all other leftovers; the places of both."""
    unfinished, old = (folder.with_name(f".{word}-{folder.name}") for word in ("unfinished", "old"))
    if old.exists() and not folder.exists():
        old.rename(folder)
    for leftover in (unfinished, old):
        shutil.rmtree(leftover, ignore_errors=True)
    return unfinished, old


def write_json(path: str | os.PathLike, value: object) -> None:
    """Write `value` as indented JSON, atomically.  Raises ValueError for NaN and infinities: see `finite_or_none`."""
    with atomic_write(path, "w") as handle:
        json.dump(value, handle, indent=2, sort_keys=False, allow_nan=False)
        handle.write("\n")


def finite_or_none(value):
    """A value made of dicts, lists and numbers with None for NaN and infinities, which JSON does not know."""
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: str | os.PathLike) -> object:
    """The value in a JSON file."""
    with open(path, encoding="utf-8") as handle:
        return json.load(handle)


def read_json_object(path: str | os.PathLike) -> dict:
    """The object in a JSON file that a user gave.  Raises InputError if it cannot be read, is damaged or holds something else."""
    try:
        value = read_json(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of thousands of digits, a thousand brackets
        raise InputError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged: a JSON object is expected")
    return value


def read_yaml_object(path: str | os.PathLike, called: str, content: str = "values by name") -> dict:
    """The mapping in a YAML file.  Raises InputError, which calls the file `called`, if there is none or it holds no `content`."""
    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{called} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise InputError(f"{called} must hold {content}")
    return value


def run_hint(folder: str | os.PathLike) -> str:
    """What to give instead of the folder of a run where a Hugging Face folder is wanted; empty for any other folder."""
    exported = Path(folder) / "hf"
    if exported.is_dir():
        return f"give {exported}, the model that this run has written"
    return "it is a run that has written no model in hf/ yet" if (Path(folder) / "run.json").is_file() else ""


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
def file_lock(path: str | os.PathLike, *, blocking: bool = True, remove: bool = False):
    """Hold an exclusive advisory lock on `path` (made if missing); freed by the kernel if the process dies.

    remove: leave no file behind.  The holder unlinks it; whoever had opened it before sees after locking that it is no longer the file
    of that name, and starts again.
    Raises BlockingIOError when `blocking` is false and another process holds it.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
            if not _is_file_at(path, handle):
                continue
            try:
                yield
            finally:
                if remove:
                    Path(path).unlink(missing_ok=True)  # before the handle is closed, and the lock freed with it
            return


def lock_fault(folder: str | os.PathLike) -> str | None:
    """Why a lock in this folder would not keep another process out, None if it would; nothing is left behind.

    Whether it keeps one of another node out cannot be told from here.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=_TEMPORARY) as handle:
        try:
            with file_lock(handle.name), file_lock(handle.name, blocking=False):
                return "two processes can hold one lock"
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return os.strerror(error.errno)


def _is_file_at(path: str | os.PathLike, handle) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle.fileno()))
    except FileNotFoundError:
        return False
