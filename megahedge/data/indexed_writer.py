"""Writing the pairs that `indexed_dataset.py` reads: piece by piece under temporary names, and published at once."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megahedge.data.indexed_dataset import CODES, HEADER, INDEX_BLOCK, MAGIC, VERSION, bin_path, blocks_digest, idx_path, index_blocks
from megahedge.utils.errors import InputError
from megahedge.utils.files import disk_errors_explained, file_lock, fsync_path, sha256_file

_SIZE = np.dtype("<i4")


def token_dtype(largest_id: int) -> np.dtype:
    """The smallest Megatron dtype that holds `largest_id`, which must count added tokens: uint16, or int32 above 65535."""
    return np.dtype(np.uint16 if largest_id <= np.iinfo(np.uint16).max else np.int32)


class IndexedDatasetWriter:
    """Write a pair document by document; each document is one sequence.

    Everything goes to `.<name>.tmp`; `finish()` flushes and renames, .idx last, so that under its final names a pair is complete or absent.
    A context manager: leaving it by an exception removes the temporary files, unless `commit()` has been called.  Memory is the same
    however much is written.
    resume_at: (documents, tokens) that an earlier writer had at a `commit()`; goes on from there, without what it wrote afterwards.
    Raises InputError if another process is writing the same prefix, for a token that `dtype` cannot hold, and where nothing is left of
    what `resume_at` names; RunError for a full disk.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype | type, *, resume_at: tuple[int, int] | None = None):
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODES or self.dtype.kind == "f":
            raise InputError(f"dtype {self.dtype} cannot hold tokens in this format; use uint16 or int32")
        self.num_documents, self.num_tokens = resume_at or (0, 0)
        self._pair = PairFiles(prefix, keep=resume_at is not None)
        self._finished = False
        self._stack = contextlib.ExitStack()
        try:
            self._stack.enter_context(self._pair)
            self._bin = self._open(self._pair.bin, self.num_tokens * self.dtype.itemsize)
            self._sizes = self._open(sizes_path(prefix), self.num_documents * _SIZE.itemsize)
        except OSError as error:
            self._stack.close()
            raise InputError(f"cannot write {self.prefix}.bin: {error.strerror}") from None
        except InputError:
            self._stack.close()
            raise

    def _open(self, path: Path, keep_bytes: int):
        """The file, opened for writing behind its first `keep_bytes` bytes."""
        if not keep_bytes:
            return self._stack.enter_context(path.open("wb", buffering=1 << 20))
        found = path.stat().st_size if path.is_file() else 0
        if found < keep_bytes:
            raise InputError(f"{path} should hold {keep_bytes} bytes of unfinished work and has {found}; begin anew with --overwrite")
        os.truncate(path, keep_bytes)
        return self._stack.enter_context(path.open("ab", buffering=1 << 20))

    def add_document(self, tokens) -> None:
        """Append one document, a non-empty sequence of token ids."""
        tokens = np.asarray(tokens)
        self.add_documents(tokens, np.array([len(tokens)]))

    def add_documents(self, tokens: np.ndarray, sizes: np.ndarray) -> None:
        """Append several documents, given as their tokens in a row and the length of each."""
        assert len(tokens) == int(np.sum(sizes, dtype=np.int64)), "the lengths do not add up to the tokens"
        assert len(sizes) == 0 or np.min(sizes) > 0, "an empty document"
        if len(sizes) == 0:
            return
        limits = np.iinfo(self.dtype)
        if np.min(tokens) < limits.min or np.max(tokens) > limits.max:
            raise InputError(f"token ids {np.min(tokens)} to {np.max(tokens)} do not fit {self.dtype} of {self.prefix}.bin")
        if np.max(sizes) > np.iinfo(np.int32).max:
            raise InputError(f"a document of {np.max(sizes)} tokens: the format allows {np.iinfo(np.int32).max}; split it")
        with disk_errors_explained(self.prefix):
            self._bin.write(np.ascontiguousarray(tokens, self.dtype).data)
            self._sizes.write(np.ascontiguousarray(sizes, _SIZE).data)
        self.num_documents += len(sizes)
        self.num_tokens += len(tokens)

    def commit(self) -> None:
        """Put everything so far on the disk and keep it there for a writer that resumes, whatever happens to this one."""
        with disk_errors_explained(self.prefix):
            for handle in (self._bin, self._sizes):
                _flush(handle)
        self._pair.keep = True

    def finish(self) -> None:
        """Make the pair appear under its final names, in the place of an older one."""
        self.prepare()
        with disk_errors_explained(self.prefix):
            publish_pair(self.prefix)
        self.close()

    def prepare(self) -> None:
        """Write what is left to write under temporary names: `publish_pair` has nothing but renames to do then."""
        with disk_errors_explained(self.prefix):
            for handle in (self._bin, self._sizes):
                _flush(handle)
            with self._pair.open_idx() as handle:
                self._write_index(handle)

    def close(self) -> None:
        """Let go of the pair once it is published."""
        self._pair.keep = False
        self._stack.close()
        self._finished = True

    def abort(self) -> None:
        """Remove what was written, unless it was committed; after `finish()` there is nothing to remove."""
        if self._finished:
            return
        for handle in (self._bin, self._sizes):
            with contextlib.suppress(OSError):  # closing flushes the buffer, which a full disk refuses
                handle.close()
        self._stack.close()
        self._finished = True

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, *_) -> None:
        """Without `finish()` nothing stays that has not been committed."""
        self.abort()

    def _write_index(self, handle) -> None:
        offsets = (np.arange(first, stop) for first, stop in index_blocks(self.num_documents + 1))
        write_index(handle, self.dtype, self.num_documents, lambda: written_sizes(self.prefix), self.num_documents + 1, offsets)


def written_sizes(prefix: str | os.PathLike) -> Iterator[np.ndarray]:
    """Lengths of the documents that a writer has noted, in blocks."""
    with open(sizes_path(prefix), "rb") as handle:
        while len(block := np.fromfile(handle, _SIZE, INDEX_BLOCK)):
            yield block


def write_index(
    handle: BinaryIO,
    dtype: np.dtype,
    num_sequences: int,
    sizes: Callable[[], Iterator[np.ndarray]],
    num_offsets: int,
    offsets: Iterable[np.ndarray],
) -> None:
    """Write an .idx file: sequence lengths and document offsets come in blocks, and the lengths twice, so that none is held whole."""
    handle.write(HEADER.pack(MAGIC, VERSION, CODES[np.dtype(dtype)], num_sequences, num_offsets))
    for block in sizes():
        handle.write(np.ascontiguousarray(block, "<i4").data)
    start = 0
    for block in sizes():
        ends = start + np.cumsum(block, dtype=np.int64) * np.dtype(dtype).itemsize
        handle.write(np.concatenate(([start], ends[:-1])).astype("<i8").data)
        start = int(ends[-1])
    for block in offsets:
        handle.write(np.ascontiguousarray(block, "<i8").data)


class PairFiles:
    """The temporary files of a pair that is being written; within `with` they are held against other writers.

    keep: leave them where they are at the end of `with`, unless they have been published.
    Entering raises InputError if another process is writing the same prefix.
    """

    def __init__(self, prefix: str | os.PathLike, *, keep: bool = False):
        self.prefix = os.fspath(prefix)
        self.bin, self.idx = (_sibling(path, ".tmp") for path in (bin_path(prefix), idx_path(prefix)))
        self.keep = keep
        self._held = contextlib.ExitStack()

    def __enter__(self) -> "PairFiles":
        try:
            self._held.enter_context(file_lock(_sibling(bin_path(self.prefix), ".lock"), blocking=False, remove=True))
        except BlockingIOError:
            raise InputError(f"another process is writing {self.prefix}; wait for it or choose another output") from None
        return self

    def __exit__(self, *_) -> None:
        if not self.keep:
            remove_unfinished(self.prefix)
        self._held.close()

    def open_bin(self) -> contextlib.AbstractContextManager[BinaryIO]:
        """The token file, which is on the disk when `with` ends."""
        return _flushed_file(self.bin)

    def open_idx(self) -> contextlib.AbstractContextManager[BinaryIO]:
        """The index file, which is on the disk when `with` ends."""
        return _flushed_file(self.idx)


@contextlib.contextmanager
def _flushed_file(path: Path) -> Iterator[BinaryIO]:
    with open(path, "wb", buffering=1 << 20) as handle:
        yield handle
        _flush(handle)


def publish_pair(prefix: str | os.PathLike) -> None:
    """Give a pair that `IndexedDatasetWriter.prepare` has written its final names; goes on where a call that was killed had got to.

    Raises InputError where a file is gone that it should find.
    """
    for path in (bin_path(prefix), idx_path(prefix)):
        if not _sibling(path, ".tmp").exists() and not path.exists():
            raise InputError(f"{_sibling(path, '.tmp')}, which was written before, is gone; begin anew with --overwrite")
    for path in (bin_path(prefix), idx_path(prefix)):
        temporary = _sibling(path, ".tmp")
        if temporary.exists():
            idx_path(prefix).unlink(missing_ok=True)  # from here to the last rename there is no pair, rather than a mixed one
            os.replace(temporary, path)
    fsync_path(bin_path(prefix).parent)


def can_resume(prefix: str | os.PathLike, dtype: np.dtype, documents: int, tokens: int) -> bool:
    """Whether what a writer had committed is still there."""
    sizes = {_sibling(bin_path(prefix), ".tmp"): tokens * dtype.itemsize, sizes_path(prefix): documents * _SIZE.itemsize}
    return all(size == 0 or (path.is_file() and path.stat().st_size >= size) for path, size in sizes.items())


def prepared_files(prefix: str | os.PathLike) -> dict[str, str]:
    """Size and a digest of blocks of each file of a pair that is ready to be published, by its final name, which it may have already."""
    found = {}
    for path in (bin_path(prefix), idx_path(prefix)):
        temporary = _sibling(path, ".tmp")
        place = temporary if temporary.exists() else path
        found[path.name] = f"{place.stat().st_size} {blocks_digest(place)}" if place.exists() else "gone"
    return found


def written_digest(prefix: str | os.PathLike) -> str:
    """SHA-256 of the token file of a pair that is ready to be published."""
    return sha256_file(_sibling(bin_path(prefix), ".tmp"))


def remove_unfinished(prefix: str | os.PathLike) -> None:
    """Remove what a writer has left of a pair that is not to be finished."""
    for path in (_sibling(bin_path(prefix), ".tmp"), _sibling(idx_path(prefix), ".tmp"), sizes_path(prefix)):
        path.unlink(missing_ok=True)


def sizes_path(prefix: str | os.PathLike) -> Path:
    """Where a writer notes the length of each document until the pair is published; int32."""
    return _sibling(bin_path(prefix), ".sizes.tmp")


def _flush(handle) -> None:
    handle.flush()
    os.fsync(handle.fileno())


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")
