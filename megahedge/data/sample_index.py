"""Which tokens make up the training sample at a position: a pure function of (seed, position, content).

Megatron's packing.  With T tokens in the corpus and L = seq_len:
  - epoch e's stream is every document once, in a permutation keyed by (seed, e); the streams of all epochs follow one another;
  - sample s covers tokens s*L to s*L + L of that endless stream: L + 1 tokens, so neighbours share one and every token is a target exactly
    once an epoch; a sample may straddle documents and the border between epochs, and T may be smaller than L;
  - the samples that start in epoch e are ceil(e*T/L) to ceil((e+1)*T/L) - 1; they are permuted among themselves, keyed by (seed, e).
Nothing depends on the length of the run, so a longer budget keeps the order of a shorter one.

megatron-core's GPTDataset cuts its stream of documents into the same samples (a test lets it do so with our order), but orders otherwise:
it shuffles with numpy's RandomState over all epochs of a run at once but the last, so that its order changes with the budget, and it
leaves out what fills no sample at the stream's end, where ours goes on into the next epoch.
"""

import functools
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megahedge.data.index_cache import ArrayCache
from megahedge.data.indexed_dataset import IndexedDataset
from megahedge.utils.errors import InputError

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_EPOCHS_IN_MEMORY = 4
_BLOCK = 1 << 16  # hashed at a time, so that they stay in the processor's cache


def permutation(length: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """uint64 [length]: a permutation keyed by (seed, epoch, purpose), the same under every version of numpy.

    The indices are sorted by their place in the splitmix64 sequence (Steele, Lea, Flood 2014) that starts at the hashed key.
    In memory it takes no more than its result: an index stands in the low bits of its hash while that is sorted.
    """
    key = 0
    for part in (seed, epoch, purpose):
        key = int(_splitmix64(np.array([(key + part + 1) & _WORD], np.uint64))[0])
    bits = max(1, (length - 1).bit_length())
    low = np.uint64((1 << bits) - 1)
    packed = np.empty(length, np.uint64)
    for first in range(0, length, _BLOCK):
        indices = np.arange(first, min(first + _BLOCK, length), dtype=np.uint64)
        packed[first : first + _BLOCK] = (_hashes(indices, key) & ~low) | indices
    packed.sort()
    _order_ties(packed, low, key)
    packed &= low
    return packed


def _order_ties(packed: np.ndarray, low: np.uint64, key: int) -> None:
    """Put entries of equal high bits into the order of their whole hashes, which are distinct."""
    tied = np.zeros(len(packed), bool)
    for first in range(0, len(packed) - 1, _BLOCK):
        part = packed[first : first + _BLOCK + 1]
        equal = (part[1:] ^ part[:-1]) <= low
        tied[first : first + len(equal)] |= equal
        tied[first + 1 : first + 1 + len(equal)] |= equal
    if tied.any():
        found = packed[tied]
        packed[tied] = found[np.lexsort((_hashes(found & low, key), found & ~low))]


def _hashes(indices: np.ndarray, key: int) -> np.ndarray:
    """Of indices, uint64; arithmetic is modulo 2^64."""
    hashes = indices + np.uint64(1)
    hashes *= np.uint64(_GOLDEN)
    hashes += np.uint64(key)
    return _splitmix64(hashes)


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 on uint64, in place; distinct inputs have distinct outputs."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


@dataclass(frozen=True)
class Piece:
    """A run of tokens of one document inside a sample."""

    document: int
    start: int
    """First token, counted from the start of the document."""
    count: int


@dataclass(frozen=True)
class _DocumentOrder:
    """Documents of one epoch in the order of their stream."""

    documents: np.ndarray  # uint32 or int64 [num_documents]
    starts: np.ndarray  # int64 [num_documents + 1]: first token of each in the epoch's stream, then T


class SampleIndex:
    """Samples of `seq_len` + 1 tokens from one corpus, in a seeded order without end.

    cache_dir: where large orders are kept between runs; by default a folder beside the data.  One process of a node builds each, the
        others wait for it; where the folder cannot be written every process builds its own.
    Raises InputError for a corpus without tokens.
    """

    def __init__(self, dataset: IndexedDataset, seq_len: int, seed: int, cache_dir: str | os.PathLike | None = None, *, mmap: bool = True):
        if seq_len < 1:
            raise InputError(f"seq_len={seq_len}: a sample needs at least one token")
        if dataset.num_tokens == 0:
            raise InputError(f"{dataset.prefix} has no tokens to train on")
        if dataset.dtype.kind == "f":
            raise InputError(f"{dataset.prefix}.bin holds {dataset.dtype} numbers, not token ids")
        self.dataset = dataset
        self.seq_len = seq_len
        self.seed = seed
        self.cache = ArrayCache(dataset, cache_dir, mmap=mmap)
        self._document_order = functools.lru_cache(_EPOCHS_IN_MEMORY)(self._load_document_order)
        self._sample_order = functools.lru_cache(_EPOCHS_IN_MEMORY)(self._load_sample_order)

    def first_sample(self, epoch: int) -> int:
        """Number of samples that start before `epoch`."""
        return -(-epoch * self.dataset.num_tokens // self.seq_len)

    def epoch(self, position: int) -> int:
        """The epoch in which the sample at `position` starts."""
        return position * self.seq_len // self.dataset.num_tokens

    def sample_number(self, position: int) -> int:
        """The number s of the sample served at `position`."""
        epoch = self.epoch(position)
        first = self.first_sample(epoch)
        return first + int(self._sample_order(epoch)[position - first])

    def pieces(self, position: int) -> list[Piece]:
        """The documents, or parts of them, that make up a sample, in order."""
        return [Piece(*run) for run in self._runs(position)]

    def _runs(self, position: int) -> Iterator[tuple[int, int, int]]:
        """Document, first token within it and count of each piece."""
        epoch, offset = divmod(self.sample_number(position) * self.seq_len, self.dataset.num_tokens)
        missing = self.seq_len + 1
        while missing:
            order = self._document_order(epoch)
            place = int(order.starts.searchsorted(offset, side="right")) - 1
            while missing and place < len(order.documents):
                start, end = order.starts[place : place + 2].tolist()
                count = min(missing, end - offset)
                if count:
                    yield int(order.documents[place]), offset - start, count
                offset, missing, place = offset + count, missing - count, place + 1
            epoch, offset = epoch + 1, 0

    def read(self, position: int) -> np.ndarray:
        """int64 [seq_len + 1]: the tokens of the sample at `position`."""
        dataset, filled = self.dataset, 0
        tokens = np.empty(self.seq_len + 1, np.int64)
        for document, start, count in self._runs(position):
            tokens[filled : filled + count] = dataset.read(dataset.document_start(document) + start, count)
            filled += count
        return tokens

    def documents_begin(self, position: int) -> list[int]:
        """Places in the sample at `position`, from 1 on, at which a document begins."""
        ends = itertools.accumulate(piece.count for piece in self.pieces(position))
        return list(ends)[:-1]

    def _load_document_order(self, epoch: int) -> _DocumentOrder:
        documents = self.cache.get(
            f"documents seed {self.seed} epoch {epoch}",
            self.dataset.num_documents,
            lambda: permutation(self.dataset.num_documents, self.seed, epoch, purpose=0),
            dtype=_smallest_dtype(self.dataset.num_documents),
        )
        starts = self.cache.get(
            f"starts seed {self.seed} epoch {epoch}",
            self.dataset.num_documents + 1,
            lambda: _permuted_starts(self.dataset, documents),
        )
        return _DocumentOrder(documents, starts)

    def _load_sample_order(self, epoch: int) -> np.ndarray:
        count = self.first_sample(epoch + 1) - self.first_sample(epoch)
        return self.cache.get(
            f"samples seq_len {self.seq_len} seed {self.seed} epoch {epoch}",
            count,
            lambda: permutation(count, self.seed, epoch, purpose=1),
            dtype=_smallest_dtype(count),
        )


def _smallest_dtype(count: int) -> np.dtype:
    """Of an array whose entries are below `count`."""
    return np.dtype(np.uint32 if count <= 1 << 32 else np.int64)


def _permuted_starts(dataset: IndexedDataset, documents: np.ndarray) -> np.ndarray:
    """int64 [num_documents + 1]: where each document begins when they follow one another in this order, then their sum."""
    starts = np.zeros(len(documents) + 1, np.int64)
    for first in range(0, len(documents), _BLOCK):
        part = documents[first : first + _BLOCK]
        starts[first + 1 : first + 1 + len(part)] = dataset.lengths_of(part)
    return np.cumsum(starts, out=starts)
