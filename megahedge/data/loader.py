"""Batches of tokens for training and validation, cut from indexed data by position."""

# b micro_batch_size, t seq_len

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megahedge.data.blending import Blend, parse_data_path
from megahedge.data.indexed_dataset import IndexedDataset
from megahedge.data.meta import find_split
from megahedge.data.sample_index import SampleIndex
from megahedge.utils.errors import InputError
from megahedge.utils.labels import IGNORE_INDEX


@dataclass(frozen=True)
class Batch:
    """One rank's micro-batch."""

    tokens: torch.Tensor  # int64 [b, t] inputs
    labels: torch.Tensor  # int64 [b, t] the token after each input, or IGNORE_INDEX
    positions: tuple[int, ...]
    """Sample positions of the rows, for error reports."""
    boundaries: torch.Tensor | None = None  # bool [b, t] true where a document begins within a row, if documents are kept apart

    def inputs(self, device: torch.device | str) -> tuple[torch.Tensor, ...]:
        """What a model is called with: tokens, labels and, where there are any, boundaries."""
        tensors = (self.tokens, self.labels, self.boundaries)
        return tuple(tensor.to(device) for tensor in tensors if tensor is not None)


class SampleSource(Protocol):
    """An endless sequence of samples."""

    seq_len: int

    def sample(self, position: int) -> np.ndarray:
        """int64 [seq_len + 1]"""

    def documents_begin(self, position: int) -> list[int]:
        """Places in the sample, from 1 on, at which a document begins."""

    def describe(self, position: int) -> str:
        """Where the sample comes from, for error messages."""


class TrainingData:
    """The training split of one corpus, or of several blended by weight, as an endless sequence of samples.

    data_path: `PREFIX` or `0.7 A 0.3 B`, see `parse_data_path`.
    index_cache_dir: folder for sample orders; None puts them beside the data.
    mmap: see IndexedDataset.
    """

    def __init__(
        self,
        data_path: str | Sequence[str],
        seq_len: int,
        seed: int,
        index_cache_dir: str | os.PathLike | None = None,
        *,
        mmap: bool = True,
    ):
        weighted = parse_data_path(data_path)
        self.seq_len = seq_len
        self.prefixes = [find_split(prefix, "train") for _, prefix in weighted]
        self.indices = [
            SampleIndex(IndexedDataset(prefix, mmap=mmap), seq_len, seed, index_cache_dir, mmap=mmap) for prefix in self.prefixes
        ]
        self.blend = Blend([weight for weight, _ in weighted])

    def sample(self, position: int) -> np.ndarray:
        """int64 [seq_len + 1]: the tokens of the sample at `position`."""
        corpus, place = self.blend.locate(position)
        return self.indices[corpus].read(place)

    def documents_begin(self, position: int) -> list[int]:
        """Places in the sample at `position`, from 1 on, at which a document begins."""
        corpus, place = self.blend.locate(position)
        return self.indices[corpus].documents_begin(place)

    def describe(self, position: int) -> str:
        """Dataset, sample number and documents behind a position."""
        corpus, place = self.blend.locate(position)
        index = self.indices[corpus]
        pieces = index.pieces(place)
        documents = f"document {pieces[0].document}" + (f" to document {pieces[-1].document}" if len(pieces) > 1 else "")
        return f"{self.prefixes[corpus]}, sample {index.sample_number(place)} (position {position}, from {documents})"

    def tokens_by_corpus(self, num_samples: int) -> dict[str, int]:
        """Tokens of each corpus among the first `num_samples` samples."""
        return {prefix: count * self.seq_len for prefix, count in zip(self.prefixes, self.blend.counts(num_samples), strict=True)}

    def epochs(self, num_samples: int) -> list[float]:
        """How many times a run of `num_samples` samples goes through each corpus."""
        counts = self.blend.counts(num_samples)
        return [count * self.seq_len / index.dataset.num_tokens for count, index in zip(counts, self.indices, strict=True)]


class BatchLoader:
    """Cut global batches into this rank's micro-batches.

    Row j of micro-batch m on rank r of a global batch is the sample at start + m * (dp_size * micro_batch_size) + r * micro_batch_size + j,
    so the samples of a global batch are the same however it is divided.
    mark_documents: whether the batches say where documents begin.
    """

    def __init__(
        self,
        data: SampleSource,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        vocab_size: int | None = None,
        mark_documents: bool = False,
    ):
        if global_batch_size % (micro_batch_size * dp_size):
            raise InputError(
                f"global_batch_size={global_batch_size} is not a multiple of micro_batch_size={micro_batch_size} times dp_size={dp_size}"
            )
        self.data = data
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.vocab_size = vocab_size
        self.mark_documents = mark_documents
        self.num_micro_batches = global_batch_size // (micro_batch_size * dp_size)

    def micro_batches(self, start_position: int) -> Iterator[Batch]:
        """This rank's micro-batches of the global batch whose first sample is at `start_position`.

        Raises InputError for a token id outside the vocabulary, naming dataset and sample.
        """
        for micro_batch in range(self.num_micro_batches):
            positions = _rank_positions(start_position, micro_batch, self.micro_batch_size, self.dp_rank, self.dp_size)
            samples = np.empty((self.micro_batch_size, self.data.seq_len + 1), np.int64)  # [b, t + 1]
            for row, position in zip(samples, positions, strict=True):
                row[:] = self.data.sample(position)
            self._check_ids(samples, positions)
            tokens = torch.from_numpy(samples)
            boundaries = (
                _marks(map(self.data.documents_begin, positions), len(positions), self.data.seq_len) if self.mark_documents else None
            )
            yield Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, boundaries)

    def _check_ids(self, samples: np.ndarray, positions: tuple[int, ...]) -> None:
        if self.vocab_size is None or (samples.min() >= 0 and samples.max() < self.vocab_size):
            return
        row = int(np.argmax(((samples < 0) | (samples >= self.vocab_size)).any(axis=1)))
        raise InputError(_bad_id(samples[row], self.vocab_size, self.data.describe(positions[row])))


class ValidationData:
    """A pair cut into windows of seq_len without overlap; each token but the very first is scored exactly once.

    Window i has inputs i*L to (i+1)*L - 1 and labels one further on; the last is padded with input 0 and label IGNORE_INDEX.
    max_tokens: score the first so many tokens only.
    mark_documents: whether the batches say where documents begin.
    mmap: see IndexedDataset.
    Raises InputError where there is no token to score, and while reading for an id outside `vocab_size`.
    """

    def __init__(
        self,
        prefix: str | os.PathLike,
        seq_len: int,
        max_tokens: int | None = None,
        vocab_size: int | None = None,
        *,
        mark_documents: bool = False,
        mmap: bool = True,
    ):
        self.mark_documents = mark_documents
        self.dataset = IndexedDataset(prefix, mmap=mmap)
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        available = self.dataset.num_tokens - 1
        self.num_scored_tokens = available if max_tokens is None else min(available, max_tokens)
        if self.num_scored_tokens < 1:
            raise InputError(
                f"{self.dataset.prefix} has {self.dataset.num_tokens} tokens in {self.dataset.num_documents} documents: nothing to score; "
                f"at least 2 tokens are needed, so preprocess more text or with a larger --val_fraction"
            )
        self.num_windows = -(-self.num_scored_tokens // seq_len)

    def num_micro_batches(self, micro_batch_size: int, dp_size: int = 1) -> int:
        """Micro-batches of every rank; equal, so that ranks stay in step."""
        return -(-self.num_windows // (micro_batch_size * dp_size))

    def micro_batches(self, micro_batch_size: int, dp_rank: int = 0, dp_size: int = 1) -> Iterator[Batch]:
        """This rank's share of the windows; rows beyond the last window are masked altogether."""
        for micro_batch in range(self.num_micro_batches(micro_batch_size, dp_size)):
            positions = _rank_positions(0, micro_batch, micro_batch_size, dp_rank, dp_size)
            rows = [self._window(window) for window in positions]
            tokens, labels = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
            begins = map(self._documents_begin, positions)
            yield Batch(tokens, labels, positions, _marks(begins, len(positions), self.seq_len) if self.mark_documents else None)

    def _documents_begin(self, window: int) -> list[int]:
        start = window * self.seq_len
        count = min(self.seq_len, self.dataset.num_tokens - start)
        return self.dataset.documents_begin(start, count).tolist() if count > 0 else []

    def _window(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.zeros(self.seq_len, np.int64)
        labels = np.full(self.seq_len, IGNORE_INDEX, np.int64)
        start = window * self.seq_len
        count = max(0, min(self.seq_len, self.num_scored_tokens - start))
        if count:
            chunk = self.dataset.read(start, count + 1).astype(np.int64)
            if self.vocab_size is not None and (chunk.min() < 0 or chunk.max() >= self.vocab_size):
                raise InputError(_bad_id(chunk, self.vocab_size, f"{self.dataset.prefix}, tokens {start} to {start + count}"))
            tokens[:count], labels[:count] = chunk[:-1], chunk[1:]
        return tokens, labels


def _marks(begins: Iterable[Sequence[int]], rows: int, seq_len: int) -> torch.Tensor:
    """bool [rows, seq_len], true where a document begins; the first place of a row needs no mark, as there is nothing before it."""
    marks = torch.zeros(rows, seq_len, dtype=torch.bool)
    for row, places in enumerate(begins):
        marks[row, [place for place in places if 0 < place < seq_len]] = True
    return marks


def _rank_positions(start: int, micro_batch: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> tuple[int, ...]:
    first = start + (micro_batch * dp_size + dp_rank) * micro_batch_size
    return tuple(range(first, first + micro_batch_size))


def _bad_id(tokens: np.ndarray, vocab_size: int, where: str) -> str:
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
    return f"token id {wrong} is outside the model's vocabulary of {vocab_size}: {where}; the data was made with another tokenizer"
