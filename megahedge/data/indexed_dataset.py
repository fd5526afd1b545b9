"""Megatron's MMIDIDX token files: `<prefix>.bin` holds the tokens, `<prefix>.idx` says where sequences and documents lie.

Layout of .idx, little-endian, as megatron-core and GPT-NeoX write it (version 1):
    9 bytes b"MMIDIDX\\0\\0" | uint64 version | uint8 dtype code | uint64 num_sequences | uint64 num_documents + 1
    int32 sizes[num_sequences]              tokens of each sequence
    int64 pointers[num_sequences]           byte offset of each sequence in .bin
    int64 document_offsets[num_documents+1] first sequence of each document, then num_sequences
"""

import contextlib
import functools
import hashlib
import os
import struct
from array import array
from pathlib import Path

import numpy as np

from megahedge.utils.errors import InputError
from megahedge.utils.files import disk_errors_explained, file_lock, fsync_path

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
_INDEX_BLOCK = 1 << 20  # index entries written at a time, so that closing a large dataset needs no second copy of its index


def token_dtype(largest_id: int) -> np.dtype:
    """The smallest Megatron dtype that holds `largest_id`, which must count added tokens: uint16, or int32 above 65535."""
    return np.dtype(np.uint16 if largest_id <= np.iinfo(np.uint16).max else np.int32)


def bin_path(prefix: str | os.PathLike) -> Path:
    """The token file of a prefix."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike) -> Path:
    """The index file of a prefix; it is written last, so that its presence says that the pair is complete."""
    return Path(f"{os.fspath(prefix)}.idx")


class IndexedDataset:
    """A memory-mapped .bin/.idx pair; nothing is copied until it is read.

    sizes             int32 [num_sequences]       tokens of each sequence
    pointers          int64 [num_sequences]       byte offset of each sequence
    document_offsets  int64 [num_documents + 1]   in sequences
    document_starts   int64 [num_documents + 1]   in tokens

    Raises InputError for a missing, truncated, foreign or inconsistent pair.
    """

    def __init__(self, prefix: str | os.PathLike):
        self.prefix = os.fspath(prefix)
        for path in (idx_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise InputError(f"{path} does not exist; a dataset is a pair {self.prefix}.bin and {self.prefix}.idx")
        self._read_index()
        self._check_index()
        # an empty file cannot be mapped
        self._tokens = np.asarray(np.memmap(bin_path(prefix), self.dtype, "r")) if self.num_tokens else np.empty(0, self.dtype)

    def _read_index(self) -> None:
        path = idx_path(self.prefix)
        length = path.stat().st_size
        if length < _HEADER.size:
            raise InputError(f"{path} is truncated: {length} bytes, its header alone has {_HEADER.size}")
        self._index = np.asarray(np.memmap(path, np.uint8, "r"))
        magic, version, code, num_sequences, num_offsets = _HEADER.unpack(self._index[: _HEADER.size].tobytes())
        if magic != MAGIC:
            raise InputError(f"{path} is not a Megatron index file: it starts with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise InputError(f"{path} has format version {version}; only version {VERSION} is known")
        if code not in _DTYPES:
            raise InputError(f"{path} has dtype code {code}; the known ones are {sorted(_DTYPES)}")
        expected = _HEADER.size + 12 * num_sequences + 8 * num_offsets
        if length != expected:
            kind = "truncated" if length < expected else "too long"
            raise InputError(f"{path} is {kind}: {length} bytes where {num_sequences} sequences and {num_offsets} offsets need {expected}")
        self.dtype = np.dtype(_DTYPES[code])
        sizes_end = _HEADER.size + 4 * num_sequences
        pointers_end = sizes_end + 8 * num_sequences
        self.sizes = self._index[_HEADER.size : sizes_end].view("<i4")
        self.pointers = self._index[sizes_end:pointers_end].view("<i8")
        self.document_offsets = self._index[pointers_end:].view("<i8")
        self.num_tokens = int(self.sizes.sum(dtype=np.int64))

    def _check_index(self) -> None:
        """The flat token stream is what training reads, so the sequences must lie in it one after another."""
        path, offsets = idx_path(self.prefix), self.document_offsets
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(self.sizes) or np.any(np.diff(offsets) < 0):
            raise InputError(f"{path} is damaged: its document offsets do not run from 0 to its {len(self.sizes)} sequences")
        ends = np.cumsum(self.sizes, dtype=np.int64) * self.dtype.itemsize
        if np.any(self.sizes < 0) or np.any(self.pointers[1:] != ends[:-1]) or np.any(self.pointers[:1] != 0):
            raise InputError(f"{path} is damaged: its pointers do not follow from its sequence lengths")
        expected, found = self.num_tokens * self.dtype.itemsize, bin_path(self.prefix).stat().st_size
        if found != expected:
            raise InputError(f"{bin_path(self.prefix)} has {found} bytes, but {path} describes {expected}; the two are not of one run")

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, sequence: int) -> np.ndarray:
        """Tokens of one sequence, a read-only view of the file."""
        if not -len(self) <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {len(self)}")
        start = int(self.pointers[sequence]) // self.dtype.itemsize
        return self._tokens[start : start + int(self.sizes[sequence])]

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens of the flat stream from token `start` on, a read-only view of the file."""
        assert start >= 0 and start + count <= self.num_tokens, f"tokens {start} to {start + count} of {self.num_tokens}"
        return self._tokens[start : start + count]

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.document_offsets) - 1

    @functools.cached_property
    def document_starts(self) -> np.ndarray:
        """int64 [num_documents + 1]: first token of each document, then num_tokens."""
        sequence_starts = np.zeros(len(self.sizes) + 1, np.int64)
        np.cumsum(self.sizes, dtype=np.int64, out=sequence_starts[1:])
        return sequence_starts[self.document_offsets]

    @functools.cached_property
    def index_digest(self) -> str:
        """SHA-256 of the whole .idx file."""
        return hashlib.sha256(self._index).hexdigest()


class IndexedDatasetWriter:
    """Write a pair document by document; each document is one sequence.

    Everything goes to `<name>.tmp`; `finish()` flushes and renames, .idx last, so that under its final names a pair is complete or absent.
    A context manager: leaving it by an exception removes the temporary files.  Keeps 4 bytes a document in memory.
    Raises InputError if another process is writing the same prefix, and for a token that `dtype` cannot hold; RunError for a full disk.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype | type):
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in _CODES or self.dtype.kind == "f":
            raise InputError(f"dtype {self.dtype} cannot hold tokens in this format; use uint16 or int32")
        self.num_tokens = 0
        self._finished = False
        self._sizes = array("i")
        self._stack = contextlib.ExitStack()
        try:
            self._stack.enter_context(file_lock(_sibling(bin_path(prefix), ".lock"), blocking=False, remove=True))
            self._bin = self._stack.enter_context(_sibling(bin_path(prefix), ".tmp").open("wb", buffering=1 << 20))
        except BlockingIOError:
            raise InputError(f"another process is writing {self.prefix}; wait for it or choose another output") from None
        except OSError as error:
            self._stack.close()
            raise InputError(f"cannot write {self.prefix}.bin: {error.strerror}") from None

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._sizes)

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
        self._sizes.frombytes(np.ascontiguousarray(sizes, np.int32).tobytes())
        self.num_tokens += len(tokens)

    def finish(self) -> None:
        """Make the pair appear under its final names, in the place of an older one."""
        paths = [bin_path(self.prefix), idx_path(self.prefix)]
        with disk_errors_explained(self.prefix):
            self._flush(self._bin)
            with open(_sibling(paths[1], ".tmp"), "wb") as handle:
                self._write_index(handle)
                self._flush(handle)
            paths[1].unlink(missing_ok=True)  # from here to the last rename there is no pair, rather than a mixed one
            for path in paths:
                os.replace(_sibling(path, ".tmp"), path)
            fsync_path(paths[0].parent)
        self._stack.close()
        self._finished = True

    def abort(self) -> None:
        """Remove what was written; after `finish()` there is nothing to remove."""
        if self._finished:
            return
        for path in (bin_path(self.prefix), idx_path(self.prefix)):
            _sibling(path, ".tmp").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # closing flushes the buffer, which a full disk refuses
            self._stack.close()
        self._finished = True

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, *_) -> None:
        """Without `finish()` nothing stays."""
        self.abort()

    def _write_index(self, handle) -> None:
        sizes = np.frombuffer(self._sizes, np.int32) if self._sizes else np.empty(0, np.int32)
        handle.write(_HEADER.pack(MAGIC, VERSION, _CODES[self.dtype], len(sizes), len(sizes) + 1))
        handle.write(sizes.astype("<i4", copy=False).tobytes())
        start = 0
        for first in range(0, len(sizes), _INDEX_BLOCK):
            ends = start + np.cumsum(sizes[first : first + _INDEX_BLOCK], dtype=np.int64)
            handle.write((np.concatenate(([start], ends[:-1])) * self.dtype.itemsize).astype("<i8").tobytes())
            start = int(ends[-1])
        for first in range(0, len(sizes) + 1, _INDEX_BLOCK):
            handle.write(np.arange(first, min(first + _INDEX_BLOCK, len(sizes) + 1), dtype="<i8").tobytes())

    @staticmethod
    def _flush(handle) -> None:
        handle.flush()
        os.fsync(handle.fileno())


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")
