"""Megatron's MMIDIDX token files: `<prefix>.bin` holds the tokens, `<prefix>.idx` says where sequences and documents lie.

Layout of .idx, little-endian, as megatron-core and GPT-NeoX write it (version 1):
    9 bytes b"MMIDIDX\\0\\0" | uint64 version | uint8 dtype code | uint64 num_sequences | uint64 num_documents + 1
    int32 sizes[num_sequences]              tokens of each sequence
    int64 pointers[num_sequences]           byte offset of each sequence in .bin
    int64 document_offsets[num_documents+1] first sequence of each document, then num_sequences
"""

import functools
import hashlib
import mmap as mmap_module
import os
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megahedge.utils.errors import InputError, RunError
from megahedge.utils.files import sha256_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
INDEX_BLOCK = 1 << 20  # index entries worked on at a time, so that nothing needs a second copy of a large index
_PRINT_BLOCKS, _PRINT_BYTES = 64, 1 << 12
_READ_BYTES = 1 << 30  # of one pread, which the system cuts at 2 GiB


def bin_path(prefix: str | os.PathLike) -> Path:
    """The token file of a prefix."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike) -> Path:
    """The index file of a prefix; it is written last, so that its presence says that the pair is complete."""
    return Path(f"{os.fspath(prefix)}.idx")


class IndexedDataset:
    """A .bin/.idx pair; nothing is read until it is asked for.

    mmap: map both files into memory, so that a read is a view of the file.  Without it .idx is read into memory and tokens by pread, for
        file systems on which mapped files are slow or, when the file changes under them, deadly (SIGBUS).
    sizes             int32 [num_sequences]       tokens of each sequence
    pointers          int64 [num_sequences]       byte offset of each sequence
    document_offsets  int64 [num_documents + 1]   in sequences

    Raises InputError for a missing, truncated, foreign or inconsistent pair.
    """

    def __init__(self, prefix: str | os.PathLike, *, mmap: bool = True):
        self.prefix = os.fspath(prefix)
        self._mmap = mmap
        for path in (idx_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise InputError(f"{path} does not exist; a dataset is a pair {self.prefix}.bin and {self.prefix}.idx")
        try:
            self._read_index()
            self._check_index()
            self._tokens = (_MappedTokens if mmap else _FileTokens)(bin_path(prefix), self.dtype, self.num_tokens)
        except OSError as error:
            raise InputError(f"cannot read {error.filename or self.prefix}: {error.strerror}") from None

    def _read_index(self) -> None:
        path = idx_path(self.prefix)
        length = path.stat().st_size
        if length < HEADER.size:
            raise InputError(f"{path} is truncated: {length} bytes, its header alone has {HEADER.size}")
        self._index, self._mapping = _map(path) if self._mmap else (np.fromfile(path, np.uint8), None)
        magic, version, code, num_sequences, num_offsets = HEADER.unpack(self._index[: HEADER.size].tobytes())
        if magic != MAGIC:
            raise InputError(f"{path} is not a Megatron index file: it starts with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise InputError(f"{path} has format version {version}; only version {VERSION} is known")
        if code not in _DTYPES:
            raise InputError(f"{path} has dtype code {code}; the known ones are {sorted(_DTYPES)}")
        expected = HEADER.size + 12 * num_sequences + 8 * num_offsets
        if length != expected:
            kind = "truncated" if length < expected else "too long"
            raise InputError(f"{path} is {kind}: {length} bytes where {num_sequences} sequences and {num_offsets} offsets need {expected}")
        self.dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        sizes_end = HEADER.size + 4 * num_sequences
        pointers_end = sizes_end + 8 * num_sequences
        self.sizes = self._index[HEADER.size : sizes_end].view("<i4")
        self.pointers = self._index[sizes_end:pointers_end].view("<i8")
        self.document_offsets = self._index[pointers_end:].view("<i8")
        self.num_tokens = int(self.sizes.sum(dtype=np.int64))

    def _check_index(self) -> None:
        """The flat token stream is what training reads, so the sequences must lie in it one after another."""
        path, offsets = idx_path(self.prefix), self.document_offsets
        if (
            len(offsets) == 0
            or offsets[0] != 0
            or offsets[-1] != len(self.sizes)
            or not _all_blocks(offsets[1:], offsets[:-1], np.greater_equal)
        ):
            raise InputError(f"{path} is damaged: its document offsets do not run from 0 to its {len(self.sizes)} sequences")
        self._one_sequence_each = len(offsets) == len(self.sizes) + 1 and self._offsets_count_up()
        if not self._pointers_follow():
            raise InputError(f"{path} is damaged: its pointers do not follow from its sequence lengths")
        if self._mapping is not None:  # the check has touched all of it, and a run touches little
            self._mapping.madvise(mmap_module.MADV_DONTNEED)
        expected, found = self.num_tokens * self.dtype.itemsize, bin_path(self.prefix).stat().st_size
        if found != expected:
            raise InputError(f"{bin_path(self.prefix)} has {found} bytes, but {path} describes {expected}; the two are not of one run")

    def _offsets_count_up(self) -> bool:
        """Whether every document is one sequence."""
        offsets = self.document_offsets
        return all(bool(np.all(offsets[first:stop] == np.arange(first, stop))) for first, stop in index_blocks(len(offsets)))

    def _pointers_follow(self) -> bool:
        """Whether every sequence begins where the one before it ends, looked at in blocks: there may be billions."""
        begin = 0
        for first, stop in index_blocks(len(self.sizes)):
            sizes, pointers = self.sizes[first:stop], self.pointers[first:stop]
            ends = begin + np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize
            if np.min(sizes) < 0 or pointers[0] != begin or np.any(pointers[1:] != ends[:-1]):
                return False
            begin = int(ends[-1])
        return True

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, sequence: int) -> np.ndarray:
        """Tokens of one sequence, read-only."""
        if not -len(self) <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {len(self)}")
        return self._tokens.read(int(self.pointers[sequence]) // self.dtype.itemsize, int(self.sizes[sequence]))

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens of the flat stream from token `start` on, read-only; a view of the file where it is mapped."""
        assert start >= 0 and start + count <= self.num_tokens, f"tokens {start} to {start + count} of {self.num_tokens}"
        return self._tokens.read(start, count)

    def blocks(self, size: int = 1 << 22) -> Iterator[tuple[int, np.ndarray]]:
        """All tokens in blocks of at most `size`, each with the place of its first."""
        for start in range(0, self.num_tokens, size):
            yield start, self.read(start, min(size, self.num_tokens - start))

    def length_blocks(self) -> Iterator[np.ndarray]:
        """Tokens of each document, in blocks."""
        return (self.document_lengths(first, stop) for first, stop in index_blocks(self.num_documents))

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.document_offsets) - 1

    def document(self, number: int) -> np.ndarray:
        """Tokens of one document, read-only."""
        start = self.document_start(number)
        return self.read(start, self.document_start(number + 1) - start)

    def document_start(self, number: int) -> int:
        """First token of a document in the flat stream; of the one after the last, num_tokens."""
        sequence = int(self.document_offsets[number])
        return int(self.pointers[sequence]) // self.dtype.itemsize if sequence < len(self.pointers) else self.num_tokens

    def document_lengths(self, first: int, stop: int) -> np.ndarray:
        """int64 [stop - first]: tokens of each of these documents."""
        return np.diff(self._starts(self.document_offsets[first : stop + 1]))

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        """int64: tokens of each of these documents."""
        if self._one_sequence_each:
            return self.sizes[documents].astype(np.int64)
        documents = documents.astype(np.int64)
        return self._starts(self.document_offsets[documents + 1]) - self._starts(self.document_offsets[documents])

    def documents_begin(self, start: int, count: int) -> np.ndarray:
        """int64: the places from 0 to count - 1, counted from token `start`, at which documents that hold a token begin."""
        stop = start + count
        first, last = (self._first_document_from(token) for token in (start, stop))
        # empty documents begin where the next one does
        begins = np.unique(self._starts(self.document_offsets[first:last])) - start
        return begins[begins < self.num_tokens - start]

    def _first_document_from(self, token: int) -> int:
        """Number of the first document that begins at `token` or later, found by bisection."""
        low, high = 0, self.num_documents
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.document_start(middle) < token else (low, middle)
        return low

    def _starts(self, sequences: np.ndarray) -> np.ndarray:
        """int64: first tokens of these sequences; of the one after the last, num_tokens."""
        if len(self.pointers) == 0:
            return np.zeros(len(sequences), np.int64)
        beyond = sequences >= len(self.pointers)
        starts = self.pointers[np.where(beyond, 0, sequences)] // self.dtype.itemsize
        starts[beyond] = self.num_tokens
        return starts

    @functools.cached_property
    def document_starts(self) -> np.ndarray:
        """int64 [num_documents + 1]: first token of each document, then num_tokens."""
        return self._starts(self.document_offsets)

    @functools.cached_property
    def index_digest(self) -> str:
        """SHA-256 of the whole .idx file."""
        return sha256_file(idx_path(self.prefix))

    @functools.cached_property
    def index_fingerprint(self) -> str:
        """SHA-256 of blocks spread over .idx, its header among them: with size and time of change enough to know it again."""
        # read from the file: of a mapping, each block would bring two megabytes into memory
        return blocks_digest(idx_path(self.prefix), _PRINT_BLOCKS, _PRINT_BYTES)


def _map(path: Path) -> tuple[np.ndarray, mmap_module.mmap]:
    """The bytes of a file that is not empty, mapped."""
    with open(path, "rb") as handle:
        mapping = mmap_module.mmap(handle.fileno(), 0, access=mmap_module.ACCESS_READ)
    return np.frombuffer(mapping, np.uint8), mapping


def _all_blocks(left: np.ndarray, right: np.ndarray, holds) -> bool:
    """Whether `holds` is true of each pair, looked at in blocks."""
    return all(bool(np.all(holds(left[first:stop], right[first:stop]))) for first, stop in index_blocks(len(left)))


class _MappedTokens:
    """Tokens as views of a mapped file."""

    def __init__(self, path: Path, dtype: np.dtype, count: int):
        # an empty file cannot be mapped
        self._tokens = np.asarray(np.memmap(path, dtype, "r")) if count else np.empty(0, dtype)

    def read(self, start: int, count: int) -> np.ndarray:
        return self._tokens[start : start + count]


class _FileTokens:
    """Tokens read from a file that stays open."""

    def __init__(self, path: Path, dtype: np.dtype, count: int):
        del count
        self._path, self._dtype = path, dtype
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, count: int) -> np.ndarray:
        size, offset = count * self._dtype.itemsize, start * self._dtype.itemsize
        blocks = []
        while size:
            block = os.pread(self._descriptor, min(size, _READ_BYTES), offset)
            if not block:
                raise RunError(f"{self._path} has become shorter than its index says: no bytes at {offset}")
            blocks.append(block)
            size, offset = size - len(block), offset + len(block)
        return np.frombuffer(blocks[0] if len(blocks) == 1 else b"".join(blocks), self._dtype)


def index_blocks(count: int) -> Iterator[tuple[int, int]]:
    """Ranges that make up 0 … count - 1, none of them long."""
    return ((first, min(first + INDEX_BLOCK, count)) for first in range(0, count, INDEX_BLOCK))


def blocks_digest(path: Path, blocks: int = 64, block_bytes: int = 1 << 16) -> str:
    """SHA-256 of blocks of a file at equal distances, its first and last bytes among them."""
    digest, last = hashlib.sha256(), max(0, path.stat().st_size - block_bytes)
    with open(path, "rb") as handle:
        for start in sorted({last * block // (blocks - 1) for block in range(blocks)}):
            handle.seek(start)
            digest.update(handle.read(block_bytes))
    return digest.hexdigest()
