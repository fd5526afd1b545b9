"""Chunks of text to tokens, in this process or in several, one result for any number of them."""

import collections
import concurrent.futures
import hashlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
import tokenizers

from megahedge.data.documents import BadRecord, Chunk
from megahedge.data.meta import SPLITS
from megahedge.data.tokenizer import SentencePieceTokenizer
from megahedge.utils.errors import InputError, RunError

_CHUNKS_IN_FLIGHT = 4  # per worker; with chunks of a megabyte this bounds the memory


@dataclass(frozen=True)
class EncoderSettings:
    """What a worker needs; plain values, so that it starts without importing transformers."""

    tokenizer_json: str | None
    """A Hugging Face tokenizer; None for a SentencePiece model."""
    sentencepiece: str | None
    """Path of such a model."""
    dtype: np.dtype
    eod_id: int
    append_eod: bool
    text_key: str
    on_bad_line: str
    seed: int
    val_fraction: float


@dataclass(frozen=True)
class Part:
    """Documents of a chunk that fall to one split, in order."""

    tokens: np.ndarray
    sizes: np.ndarray  # int32 [documents]
    text_bytes: int
    words: int
    eod_tokens: int


@dataclass(frozen=True)
class Encoded:
    """A chunk as tokens."""

    parts: dict[str, Part]
    skipped: collections.Counter

    @property
    def num_documents(self) -> int:
        """Those of all splits."""
        return sum(len(part.sizes) for part in self.parts.values())

    @property
    def num_tokens(self) -> int:
        """Those of all splits."""
        return sum(len(part.tokens) for part in self.parts.values())


class Encoder:
    """Turns a chunk of records into tokens, one in each worker."""

    def __init__(self, settings: EncoderSettings):
        self._settings = settings
        self._encode_batch = _batch_encoder(settings)
        self._hash_key = settings.seed.to_bytes(8, "little")
        self._val_limit = round(settings.val_fraction * 2**64)

    def encode(self, chunk: Chunk) -> Encoded:
        """Tokens of every document in the chunk.  Raises InputError, with where it is, for a bad record unless they are skipped."""
        texts, skipped = self._texts(chunk)
        end = [self._settings.eod_id] if self._settings.append_eod else []
        members = {split: [] for split in SPLITS}
        for text, ids in zip(texts, self._encode_batch(texts), strict=True):
            if ids:  # a tokenizer may make nothing of a text
                utf8 = text.encode()
                members["val" if self._in_val(utf8) else "train"].append((ids + end, len(utf8), len(text.split())))
            else:
                skipped["no_tokens"] += 1
        return Encoded({split: self._part(found) for split, found in members.items()}, +skipped)

    def _part(self, documents: list[tuple[list[int], int, int]]) -> Part:
        sizes = np.array([len(row) for row, _, _ in documents], np.int32)
        ids = itertools.chain.from_iterable(row for row, _, _ in documents)
        tokens = np.fromiter(ids, self._settings.dtype, int(sizes.sum()))
        text_bytes, words = (sum(document[place] for document in documents) for place in (1, 2))
        return Part(tokens, sizes, text_bytes, words, int(np.count_nonzero(tokens == self._settings.eod_id)))

    def _texts(self, chunk: Chunk) -> tuple[list[str], collections.Counter]:
        texts, skipped = [], collections.Counter()
        for where, text in chunk.documents(self._settings.text_key):
            if not isinstance(text, BadRecord):
                texts.append(text)
                continue
            if text.reason != "empty" and self._settings.on_bad_line == "error":
                raise InputError(f"{where}: {text} (--on_bad_line skip leaves such records out)")
            skipped[text.reason] += 1
        return texts, skipped

    def _in_val(self, utf8: bytes) -> bool:
        """By the text alone: more data never moves a document, and copies of a document share a side."""
        digest = hashlib.blake2b(utf8, digest_size=8, key=self._hash_key).digest()
        return int.from_bytes(digest, "little") < self._val_limit


def _batch_encoder(settings: EncoderSettings) -> Callable[[Sequence[str]], Iterable[list[int]]]:
    """Texts to ids, on one thread and without the marks that models of other kinds put around a text."""
    if settings.sentencepiece is not None:
        return SentencePieceTokenizer(settings.sentencepiece).encode_batch
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker is one thread
    tokenizer = tokenizers.Tokenizer.from_str(settings.tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda texts: [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


_worker_encoder: Encoder | None = None


def _start_worker(settings: EncoderSettings) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches every process of the terminal; the parent ends the workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker_encoder = Encoder(settings)


def _exit_with_parent() -> None:
    """A parent that is killed cannot end its workers, and a worker that waits for work would wait for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _encode_chunk(chunk: Chunk) -> Encoded:
    return _worker_encoder.encode(chunk)


def encode_in_order(chunks: Iterable[Chunk], settings: EncoderSettings, workers: int) -> Iterator[tuple[Chunk, Encoded]]:
    """Each chunk with its tokens, in their order, at most `_CHUNKS_IN_FLIGHT` chunks a worker ahead of the consumer.

    Raises RunError for a worker that dies, naming what it was reading.
    """
    if workers == 1:
        encoder = Encoder(settings)
        yield from ((chunk, encoder.encode(chunk)) for chunk in chunks)
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    executor = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (settings,))
    in_flight, last = collections.deque(), "the input"
    try:
        for chunk in chunks:
            last = chunk.source
            in_flight.append((chunk, executor.submit(_encode_chunk, chunk)))
            if len(in_flight) >= workers * _CHUNKS_IN_FLIGHT:
                yield _take(in_flight)
        while in_flight:
            yield _take(in_flight)
    except BrokenProcessPool:
        # the pool ends those that it knows of; one that it was about to start would keep it, and this process, from ending
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        reading = in_flight[0][0].source if in_flight else last
        raise RunError(f"a worker process died on {reading}: killed, or out of memory (then use fewer --workers)") from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _take(in_flight: collections.deque) -> tuple[Chunk, Encoded]:
    chunk, future = in_flight[0]
    result = future.result()
    in_flight.popleft()
    return chunk, result
