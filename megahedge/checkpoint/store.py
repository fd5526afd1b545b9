"""Checkpoint folders that are complete or invisible, whatever kills the writer, and that say so when a disk has changed them.

    <root>/step-00001000/checkpoint.json          record, files with sizes and digests, which file holds which tensor; its own digest
                         parameters-00000.safetensors …   whole tensors, whatever topology wrote them
                         optimizer-00000.safetensors …
    <root>/latest                                  name of the newest complete checkpoint, for people and scripts
    <root>/best                                    link to the one with the lowest validation loss, where a run keeps it

A checkpoint is written under a temporary name, flushed to the disk, its checkpoint.json last, and then renamed.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megahedge.utils.errors import InputError
from megahedge.utils.files import (
    apply_umask,
    atomic_write,
    fsync_path,
    os_errors_told,
    read_json,
    remove_temporary_files,
    sha256_file,
    write_json,
)
from megahedge.utils.logging import get_logger

logger = get_logger(__name__)

FORMAT = 1
MANIFEST = "checkpoint.json"
MAX_FILE_BYTES = 2 * 2**30
_COMPLETE = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"


class CheckpointWriter:
    """Collects tensors of one checkpoint; `finish` makes it visible.  Used by one process."""

    def __init__(self, root: Path, step: int):
        self.root = root
        self.step = step
        self._folder = root / f"{_UNFINISHED}{_folder_name(step)}"
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True)
        self._pending: dict[str, dict[str, Tensor]] = {}
        self._files: dict[str, dict] = {}
        self._tensors: dict[str, dict[str, str]] = {}

    def add(self, group: str, name: str, tensor: Tensor) -> None:
        """Add a whole tensor to `group`; files of a group are written when they reach MAX_FILE_BYTES."""
        pending = self._pending.setdefault(group, {})
        pending[name] = tensor.detach().to("cpu").contiguous()
        if sum(tensor.nbytes for tensor in pending.values()) >= MAX_FILE_BYTES:
            self._flush(group)

    def _flush(self, group: str) -> None:
        tensors = self._pending.pop(group)
        number = sum(file.startswith(f"{group}-") for file in self._files)
        file = f"{group}-{number:05d}.safetensors"
        path = self._folder / file
        with os_errors_told(path):
            save_file(tensors, path)
        apply_umask(path)
        fsync_path(path)
        self._files[file] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        self._tensors.setdefault(group, {}).update(dict.fromkeys(tensors, file))

    def read(self, group: str, name: str) -> Tensor:
        """A tensor that was added before, from the file where it has been written to one."""
        pending = self._pending.get(group, {})
        if name in pending:
            return pending[name]
        with safe_open(self._folder / self._tensors[group][name], framework="pt") as handle:
            return handle.get_tensor(name)

    def finish(self, record: dict) -> "Checkpoint":
        """Write what is left, then the manifest, and give the folder its final name."""
        for group in list(self._pending):
            self._flush(group)
        manifest = {"format": FORMAT, "step": self.step, "record": record, "files": self._files, "tensors": self._tensors}
        write_json(self._folder / MANIFEST, manifest | {"sha256": _manifest_digest(manifest)})
        fsync_path(self._folder)
        final = self.root / _folder_name(self.step)
        _discard(final)
        self._folder.rename(final)
        fsync_path(self.root)
        with atomic_write(self.root / "latest", "w") as handle:
            handle.write(final.name + "\n")
        return Checkpoint(final)

    def abandon(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self._folder, ignore_errors=True)


class UnknownFormatError(InputError):
    """A checkpoint of another version: not damaged, so nothing may pass it over."""


class Checkpoint:
    """A complete checkpoint.  Raises InputError if its manifest cannot be read."""

    def __init__(self, path: Path):
        self.path = path
        try:
            manifest = read_json(path / MANIFEST)
            written = manifest["format"]
            if written != FORMAT:  # before anything else, as another version may have other keys
                raise UnknownFormatError(f"checkpoint {path} has format {written}; this version reads format {FORMAT}")
            self.step: int = manifest["step"]
            self.record: dict = manifest["record"]
            self._files: dict = manifest["files"]
            self._tensors: dict = manifest["tensors"]
            self._manifest = manifest
        except UnknownFormatError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"checkpoint {path} has no readable {MANIFEST}: {error}") from None

    def names(self, group: str) -> list[str]:
        """Names of the tensors of a group, in the order in which they were added."""
        return list(self._tensors.get(group, {}))

    def verify(self, groups: Iterable[str] | None = None) -> None:
        """Compare sizes and digests of the groups' files (of all files by default) with the manifest.

        Raises InputError naming the first file that differs or cannot be read.
        """
        rest = {key: value for key, value in self._manifest.items() if key != "sha256"}
        if self._manifest.get("sha256") != _manifest_digest(rest):
            raise InputError(f"checkpoint {self.path}: {MANIFEST} does not have the digest that was written")
        wanted = set(self._files) if groups is None else {file for group in groups for file in self._tensors.get(group, {}).values()}
        for file in sorted(wanted):
            try:
                self._verify_file(file, self._files[file])
            except OSError as error:
                raise InputError(f"checkpoint {self.path}: {file} cannot be read: {error}") from None

    def _verify_file(self, file: str, expected: dict) -> None:
        path = self.path / file
        if not path.is_file():
            raise InputError(f"checkpoint {self.path}: {file} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise InputError(f"checkpoint {self.path}: {file} has {path.stat().st_size} bytes instead of {expected['bytes']}")
        if sha256_file(path) != expected["sha256"]:
            raise InputError(f"checkpoint {self.path}: {file} does not have the digest that was written")

    def read(self, group: str, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """A tensor, or the piece `index` of it.  Raises InputError if the checkpoint does not hold it."""
        file = self._tensors.get(group, {}).get(name)
        if file is None:
            raise InputError(f"checkpoint {self.path} holds no {group} tensor {name}")
        try:
            with safe_open(self.path / file, framework="pt") as handle:
                stored = handle.get_slice(name)
                return stored[index] if index else handle.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InputError(f"checkpoint {self.path}: {file} cannot be read: {error}") from None


class StoredGroup:
    """One group of a checkpoint's tensors."""

    def __init__(self, checkpoint: Checkpoint, group: str):
        self._checkpoint, self._group = checkpoint, group
        self._names = frozenset(checkpoint.names(group))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        """A tensor, or the piece `index` of it.  Raises InputError if it is not there."""
        return self._checkpoint.read(self._group, name, index)


def _manifest_digest(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step of a complete checkpoint's folder."""
    return int(_COMPLETE.fullmatch(path.name)[1])


def complete_checkpoints(root: Path) -> list[Path]:
    """Folders of complete checkpoints, newest first."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _COMPLETE.fullmatch(path.name)), key=step_of, reverse=True)


def newest_sound(root: Path, groups: Iterable[str] | None = None) -> Checkpoint | None:
    """The newest checkpoint whose files (of these groups) are as they were written; damaged ones are named and passed over.

    Raises UnknownFormatError for one of another version.
    """
    for path in complete_checkpoints(root):
        try:
            checkpoint = Checkpoint(path)
            checkpoint.verify(groups)
        except UnknownFormatError:
            raise
        except InputError as error:
            logger.warning("%s; trying the one before", error)
            continue
        return checkpoint
    return None


def best_checkpoint(root: Path) -> Path | None:
    """The checkpoint that `mark_best` has named; None where there is none, or no longer."""
    link = root / "best"
    if not link.is_symlink():
        return None
    target = root / os.readlink(link)
    return target if _COMPLETE.fullmatch(target.name) and target.is_dir() else None


def mark_best(root: Path, step: int) -> None:
    """Let the link `best` name the checkpoint of `step`, which `rotate` then keeps."""
    temporary = root / ".best.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(_folder_name(step))
    temporary.replace(root / "best")
    fsync_path(root)


def forget_best_after(root: Path, step: int) -> None:
    """Drop the name of a best checkpoint later than `step`, to which a run has gone back."""
    best = best_checkpoint(root)
    if best is not None and step_of(best) > step:
        (root / "best").unlink()


def open_checkpoint(path: str | Path, groups: Iterable[str] | None = None) -> Checkpoint:
    """A checkpoint from its own folder, or the newest sound one of a run folder or of a folder of checkpoints.

    Only the files of `groups` are verified, where they are given.  Raises InputError if there is none.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        checkpoint = Checkpoint(path)
        checkpoint.verify(groups)
        return checkpoint
    for root in (path / "checkpoints", path):
        checkpoint = newest_sound(root, groups)
        if checkpoint is not None:
            return checkpoint
    raise InputError(f"{path} holds no complete checkpoint; give a run folder or one of its checkpoints/step-… folders")


def rotate(root: Path, keep_last: int, step: int) -> None:
    """Remove all complete checkpoints up to `step`, the one just written, but the newest `keep_last` and the best one.

    Later ones can only be damaged ones that a resumed run has passed over; they count for nothing, and the run writes them again.
    One process calls it, after `finish`.
    """
    best = best_checkpoint(root)
    for path in [path for path in complete_checkpoints(root) if step_of(path) <= step][keep_last:]:
        if path != best:
            _discard(path)


def remove_unfinished(root: Path) -> None:
    """Remove what killed writers have left."""
    for path in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path)
    remove_temporary_files(root)


def _discard(path: Path) -> None:
    """Remove a checkpoint so that a kill half-way leaves nothing that looks complete."""
    if path.exists():
        doomed = path.with_name(f"{_UNFINISHED}removed-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
