"""Text to a training and a validation pair of indexed token files, with several processes and bounded memory.

One process reads and writes, the workers tokenise.  Results are taken in the order of the input and a document's split is a hash of its
text, so the output depends neither on the number of workers nor on what else is in the input.
"""

import collections
import concurrent.futures
import contextlib
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tokenizers
import tqdm

from megahedge.data.documents import BadRecord, Chunk, Source, find_sources, record_text
from megahedge.data.indexed_dataset import IndexedDatasetWriter, bin_path, idx_path, token_dtype
from megahedge.data.meta import SPLITS, DatasetMeta, SplitMeta, meta_path, tokenizer_digest, write_meta
from megahedge.data.tokenizer import load_tokenizer
from megahedge.utils.errors import InputError
from megahedge.utils.files import check_output, disk_errors_explained
from megahedge.utils.logging import get_logger
from megahedge.utils.units import format_count, format_seconds

_CHUNKS_IN_FLIGHT = 4  # per worker; with chunks of a megabyte this bounds the memory
_PROGRESS_SECONDS = 10
_CONTENT_OPTIONS = ("tokenizer_revision", "text_key", "val_fraction", "seed", "append_eod", "on_bad_line")

logger = get_logger(__name__)


@dataclass(frozen=True)
class PreprocessConfig:
    """Options of tools/preprocess_owt.py."""

    output_prefix: str
    """Where the dataset goes: PREFIX_train.bin/.idx, PREFIX_val.bin/.idx and PREFIX.meta.json"""
    tokenizer: str
    """Folder or hub name of the model whose tokenizer is used; it must be that of the teacher"""
    input: tuple[str, ...] = ("Skylion007/openwebtext",)
    """Text: .jsonl or .jsonl.gz files, globs, folders of them, a folder saved by `datasets`, or the name of a hub dataset"""
    tokenizer_revision: str | None = None
    """Commit, tag or branch of a tokenizer on the hub"""
    text_key: str = "text"
    """Key (column) of a record that holds the document's text"""
    val_fraction: float = 0.0005
    """Share of the documents that go to the validation pair, chosen by a hash of their text (0 to 1)"""
    seed: int = 1234
    """Seed of that hash"""
    append_eod: bool = True
    """End each document with the tokenizer's end-of-text token"""
    on_bad_line: str = "error"
    """What to do with a record that is malformed: error (stop, naming file and line) or skip (count and go on)"""
    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Processes that tokenise; the output does not depend on it"""
    overwrite: bool = False
    """Replace an existing dataset at this prefix"""

    def __post_init__(self):
        if not 0 <= self.val_fraction <= 1:
            raise InputError(f"--val_fraction={self.val_fraction} must lie between 0 and 1")
        if self.workers < 1:
            raise InputError(f"--workers={self.workers} must be at least 1")
        if self.on_bad_line not in ("error", "skip"):
            raise InputError(f"--on_bad_line={self.on_bad_line} is not known; use error or skip")
        if not 0 <= self.seed < 2**64:
            raise InputError(f"--seed={self.seed} must lie between 0 and 2^64 - 1")
        if os.path.basename(self.output_prefix) in ("", ".", ".."):
            raise InputError(f"--output_prefix={self.output_prefix!r} must end in a name, such as data/openwebtext")


@dataclass(frozen=True)
class _EncoderSettings:
    """What a worker needs; plain values, so that it starts without importing transformers."""

    tokenizer_json: str
    dtype: np.dtype
    eod_id: int | None
    """Appended to each document unless None."""
    text_key: str
    on_bad_line: str
    seed: int
    val_fraction: float


@dataclass(frozen=True)
class _Encoded:
    """A chunk's documents as tokens, in order."""

    tokens: np.ndarray
    sizes: np.ndarray  # int32 [documents]
    text_bytes: np.ndarray  # int64 [documents]
    words: np.ndarray  # int64 [documents]
    in_val: np.ndarray  # bool [documents]
    skipped: collections.Counter


def preprocess(config: PreprocessConfig) -> DatasetMeta:
    """Tokenise `config.input` into `config.output_prefix`; returns what meta.json then says.

    Raises InputError for bad input, an existing output, a worker that died, or input without a document, and RunError for a full disk;
    then no output appears.
    """
    _check_output(config)
    sources = find_sources(config.input)
    tokenizer = load_tokenizer(config.tokenizer, config.tokenizer_revision, option="tokenizer")
    largest_id = max(tokenizer.get_vocab().values())
    settings = _encoder_settings(config, tokenizer, largest_id)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        prefixes = {split: f"{config.output_prefix}_{split}" for split in SPLITS}
        writers = {split: stack.enter_context(IndexedDatasetWriter(prefix, settings.dtype)) for split, prefix in prefixes.items()}
        _check_output(config)  # again: another process may have finished the dataset before the writers took their locks
        totals = _Totals(writers)
        progress = stack.enter_context(_Progress(sources))
        encoded = stack.enter_context(contextlib.closing(_encode_in_order(sources, settings, config.workers)))
        for chunk, result in encoded:
            totals.add(result)
            progress.update(chunk, result)
        if totals.num_documents == 0:
            skipped = ", ".join(f"{count} {reason}" for reason, count in totals.skipped.items()) or "no records"
            raise InputError(f"no document in --input {' '.join(config.input)} ({skipped})")
        meta = DatasetMeta(
            tokenizer_digest=tokenizer_digest(tokenizer),
            tokenizer_name=config.tokenizer,
            vocab_size=largest_id + 1,
            eod_id=_eod_id(tokenizer, config.tokenizer),
            splits=totals.split_metas(),
            skipped=dict(sorted(totals.skipped.items())),
            source=[source.record() for source in sources],
            options={name: getattr(config, name) for name in _CONTENT_OPTIONS},
        )
        _publish(config.output_prefix, writers, meta)
    _report(config.output_prefix, meta, time.monotonic() - started)
    return meta


def _check_output(config: PreprocessConfig) -> None:
    prefixes = [f"{config.output_prefix}_{split}" for split in SPLITS]
    paths = [path(prefix) for prefix in prefixes for path in (bin_path, idx_path)] + [meta_path(config.output_prefix)]
    check_output("output_prefix", config.output_prefix, *paths, overwrite=config.overwrite)


def _publish(prefix: str, writers: dict[str, IndexedDatasetWriter], meta: DatasetMeta) -> None:
    """Make the dataset appear: meta.json, which vouches for both pairs, goes first and comes last."""
    meta_path(prefix).unlink(missing_ok=True)
    for writer in writers.values():
        writer.finish()
    with disk_errors_explained(meta_path(prefix)):
        write_meta(prefix, meta)


def _eod_id(tokenizer, name: str) -> int:
    if tokenizer.eos_token_id is None:
        raise InputError(f"--tokenizer={name} has no end-of-text token (eos_token)")
    return tokenizer.eos_token_id


def _encoder_settings(config: PreprocessConfig, tokenizer, largest_id: int) -> _EncoderSettings:
    eod_id = _eod_id(tokenizer, config.tokenizer)
    return _EncoderSettings(
        tokenizer_json=tokenizer.backend_tokenizer.to_str(),
        dtype=token_dtype(largest_id),
        eod_id=eod_id if config.append_eod else None,
        text_key=config.text_key,
        on_bad_line=config.on_bad_line,
        seed=config.seed,
        val_fraction=config.val_fraction,
    )


class _Encoder:
    """Turns a chunk of records into tokens, one in each worker."""

    def __init__(self, settings: _EncoderSettings):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker is one thread
        self._settings = settings
        self._tokenizer = tokenizers.Tokenizer.from_str(settings.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._hash_key = settings.seed.to_bytes(8, "little")
        self._val_limit = round(settings.val_fraction * 2**64)

    def encode(self, chunk: Chunk) -> _Encoded:
        """Tokens of every document in the chunk.  Raises InputError with `file:line` for a bad record unless they are skipped."""
        texts, skipped = self._texts(chunk)
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        end = [] if self._settings.eod_id is None else [self._settings.eod_id]
        rows = [np.array(encoding.ids + end, self._settings.dtype) for encoding in encodings]
        kept = [index for index, row in enumerate(rows) if len(row)]  # a tokenizer may make nothing of a text, and a document has a token
        skipped["no_tokens"] += len(rows) - len(kept)
        texts, rows = [texts[index] for index in kept], [rows[index] for index in kept]
        utf8 = [text.encode() for text in texts]
        return _Encoded(
            tokens=np.concatenate([np.empty(0, self._settings.dtype), *rows]),
            sizes=np.array([len(row) for row in rows], np.int32),
            text_bytes=np.array([len(text) for text in utf8], np.int64),
            words=np.array([len(text.split()) for text in texts], np.int64),
            in_val=np.array([self._in_val(text) for text in utf8], bool),
            skipped=+skipped,
        )

    def _texts(self, chunk: Chunk) -> tuple[list[str], collections.Counter]:
        texts, skipped = [], collections.Counter()
        for index, record in enumerate(chunk.records):
            try:
                texts.append(record_text(record, self._settings.text_key))
            except BadRecord as bad:
                if bad.reason != "empty" and self._settings.on_bad_line == "error":
                    raise InputError(f"{chunk.where(index)}: {bad} (--on_bad_line skip leaves such records out)") from None
                skipped[bad.reason] += 1
        return texts, skipped

    def _in_val(self, utf8: bytes) -> bool:
        """By the text alone: more data never moves a document, and copies of a document share a side."""
        digest = hashlib.blake2b(utf8, digest_size=8, key=self._hash_key).digest()
        return int.from_bytes(digest, "little") < self._val_limit


_worker_encoder: _Encoder | None = None


def _start_worker(settings: _EncoderSettings) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches every process of the terminal; the parent ends the workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker_encoder = _Encoder(settings)


def _exit_with_parent() -> None:
    """A parent that is killed cannot end its workers, and a worker that waits for work would wait for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _encode_chunk(chunk: Chunk) -> _Encoded:
    return _worker_encoder.encode(chunk)


def _encode_in_order(sources: list[Source], settings: _EncoderSettings, workers: int) -> Iterator[tuple[Chunk, _Encoded]]:
    """Each chunk with its tokens, in the order of the input, at most `_CHUNKS_IN_FLIGHT` chunks a worker ahead of the consumer."""
    if workers == 1:
        encoder = _Encoder(settings)
        for source in sources:
            yield from ((chunk, encoder.encode(chunk)) for chunk in source.chunks(settings.text_key))
        return
    context = multiprocessing.get_context("spawn")
    executor = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (settings,))
    in_flight = collections.deque()
    try:
        for source in sources:
            for chunk in source.chunks(settings.text_key):
                in_flight.append((chunk, executor.submit(_encode_chunk, chunk)))
                if len(in_flight) >= workers * _CHUNKS_IN_FLIGHT:
                    yield _take(in_flight)
        while in_flight:
            yield _take(in_flight)
    except BrokenProcessPool:
        reading = in_flight[0][0].source if in_flight else sources[-1].name
        raise InputError(f"a worker process died on {reading}: killed, or out of memory (then use fewer --workers)") from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _take(in_flight: collections.deque) -> tuple[Chunk, _Encoded]:
    chunk, future = in_flight[0]
    result = future.result()
    in_flight.popleft()
    return chunk, result


class _Totals:
    """Writes encoded chunks to their pairs and counts."""

    def __init__(self, writers: dict[str, IndexedDatasetWriter]):
        self._writers = writers
        self._text_bytes = collections.Counter()
        self._words = collections.Counter()
        self.skipped = collections.Counter()

    @property
    def num_documents(self) -> int:
        """Documents written to either pair."""
        return sum(writer.num_documents for writer in self._writers.values())

    def add(self, result: _Encoded) -> None:
        """Write a chunk's documents to the pair that each belongs to."""
        self.skipped.update(result.skipped)
        token_in_val = np.repeat(result.in_val, result.sizes)
        for split, documents, tokens in (("train", ~result.in_val, ~token_in_val), ("val", result.in_val, token_in_val)):
            self._writers[split].add_documents(result.tokens[tokens], result.sizes[documents])
            self._text_bytes[split] += int(result.text_bytes[documents].sum())
            self._words[split] += int(result.words[documents].sum())

    def split_metas(self) -> dict[str, SplitMeta]:
        """Counts by split."""
        return {
            split: SplitMeta(writer.num_documents, writer.num_tokens, self._text_bytes[split], self._words[split])
            for split, writer in self._writers.items()
        }


class _Progress:
    """A bar on a terminal, a line every ten seconds elsewhere: documents/s, tokens/s, MB/s of text."""

    def __init__(self, sources: list[Source]):
        self._num_sources = len(sources)
        self._names = {}
        self._documents = self._tokens = self._bytes = 0
        self._started = self._last_line = time.monotonic()
        self._bar = tqdm.tqdm(unit="doc", unit_scale=True, dynamic_ncols=True) if sys.stderr.isatty() else None

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, chunk: Chunk, result: _Encoded) -> None:
        """Count one chunk and show it."""
        self._names[chunk.source] = len(self._names) + 1 if chunk.source not in self._names else self._names[chunk.source]
        self._documents += len(result.sizes)
        self._tokens += len(result.tokens)
        self._bytes += chunk.num_bytes
        now = time.monotonic()
        seconds = max(now - self._started, 1e-9)
        rates = f"{format_count(self._tokens / seconds)} tokens/s, {self._bytes / seconds / 1e6:.1f} MB/s"
        where = f"{Path(chunk.source).name} ({self._names[chunk.source]} of {self._num_sources})"
        if self._bar is not None:
            self._bar.set_postfix_str(f"{rates}, {where}", refresh=False)
            self._bar.update(len(result.sizes))
        elif now - self._last_line >= _PROGRESS_SECONDS:
            self._last_line = now
            counts = f"{self._documents} documents, {format_count(self._tokens)} tokens"
            logger.info("%s: %s; %.0f documents/s, %s", where, counts, self._documents / seconds, rates)


def _report(prefix: str, meta: DatasetMeta, seconds: float) -> None:
    for split, counts in meta.splits.items():
        logger.info("%s_%s: %d documents, %d tokens", prefix, split, counts.documents, counts.tokens)
    if meta.skipped:
        logger.info("left out: %s", ", ".join(f"{count} {reason}" for reason, count in meta.skipped.items()))
    for split, counts in meta.splits.items():
        if counts.documents == 0:
            logger.warning("no document fell into the %s split; change --val_fraction (or --seed) or give more text", split)
    documents, tokens = (sum(getattr(counts, name) for counts in meta.splits.values()) for name in ("documents", "tokens"))
    rates = f"{documents / seconds:.0f} documents/s, {format_count(tokens / seconds)} tokens/s"
    logger.info("wrote %s in %s (%s)", meta_path(prefix), format_seconds(seconds), rates)
