"""Text to a training and a validation pair of indexed token files, with several processes and bounded memory.

One process reads and writes, the workers tokenise.  Results are taken in the order of the input and a document's split is a hash of its
text, so the output depends neither on the number of workers nor on what else is in the input.

A job that is ended goes on where it was: every second or so the tokens so far are put on the disk, and then the journal that says how
many they are and how far the input has been read.  A restart cuts off what came after, reads the input's file of that moment again up to
there, and writes what an unbroken run would have written.
"""

import contextlib
import hashlib
import itertools
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megahedge.data.encoding import Encoded, EncoderSettings, encode_in_order
from megahedge.data.find_sources import find_sources
from megahedge.data.indexed_dataset import bin_path, idx_path
from megahedge.data.indexed_writer import (
    IndexedDatasetWriter,
    PairFiles,
    can_resume,
    prepared_files,
    remove_unfinished,
    token_dtype,
    written_digest,
    written_sizes,
)
from megahedge.data.journal import Journal
from megahedge.data.meta import (
    COUNTS,
    SPLITS,
    DatasetMeta,
    SplitMeta,
    check_output_prefix,
    describe,
    meta_path,
    publish_dataset,
    sentencepiece_digest,
    tokenizer_digest,
    tokens_per_document,
    unfinished_path,
    writing_dataset,
)
from megahedge.data.progress import PreprocessProgress
from megahedge.data.sources import Reading, Source, TextFile
from megahedge.data.tokenizer import SentencePieceTokenizer, load_tokenizer
from megahedge.utils.errors import InputError
from megahedge.utils.files import check_output
from megahedge.utils.logging import get_logger

_CONTENT_OPTIONS = ("tokenizer_revision", "text_key", "document_separator", "val_fraction", "seed", "append_eod", "on_bad_line")
_FORMAT = 1  # of chunks and journal: a change makes unfinished work of older versions unusable
_COMMIT_SECONDS = 1.0
_COMMIT_SHARE = 0.05
"""Of the time, at most, that goes into commits."""

logger = get_logger(__name__)


@dataclass(frozen=True)
class PreprocessConfig:
    """Options of tools/preprocess_owt.py."""

    output_prefix: str
    """Where the dataset goes: PREFIX_train.bin/.idx, PREFIX_val.bin/.idx and PREFIX.meta.json"""
    tokenizer: str | None = None
    """Folder or hub name of the model whose tokenizer is used; it must be that of the teacher"""
    sentencepiece: str | None = None
    """Instead of --tokenizer: a SentencePiece model file, such as the teacher's tokenizer.model"""
    input: tuple[str, ...] = ("Skylion007/openwebtext",)
    """Text: files of JSON lines, plain text (.txt), parquet or tar archives, also compressed (.gz, .bz2, .xz, .zst); globs and folders of
    them; a folder saved by `datasets`; or the name of a hub dataset"""
    tokenizer_revision: str | None = None
    """Commit, tag or branch of a tokenizer on the hub"""
    text_key: str = "text"
    """Key (column) of a record that holds the document's text; dots lead into nested records"""
    document_separator: str | None = None
    """Line that stands between the documents of a .txt file; without it each such file is one document"""
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
    """Replace an existing dataset at this prefix, and unfinished work there that was begun with other options"""

    def __post_init__(self):
        if not 0 <= self.val_fraction <= 1:
            raise InputError(f"--val_fraction={self.val_fraction} must lie between 0 and 1")
        if self.workers < 1:
            raise InputError(f"--workers={self.workers} must be at least 1")
        if self.on_bad_line not in ("error", "skip"):
            raise InputError(f"--on_bad_line={self.on_bad_line} is not known; use error or skip")
        if not 0 <= self.seed < 2**64:
            raise InputError(f"--seed={self.seed} must lie between 0 and 2^64 - 1")
        check_output_prefix(self.output_prefix)
        if (self.tokenizer is None) == (self.sentencepiece is None):
            raise InputError("give one of --tokenizer FOLDER_OR_NAME and --sentencepiece FILE")
        if self.sentencepiece is not None and self.tokenizer_revision is not None:
            raise InputError(f"--tokenizer_revision={self.tokenizer_revision} goes with --tokenizer, not with --sentencepiece")
        if self.document_separator is not None and ("\n" in self.document_separator or not self.document_separator):
            raise InputError(f"--document_separator={self.document_separator!r} must be one line, and not an empty one")

    @property
    def prefixes(self) -> dict[str, str]:
        """Of each split's pair."""
        return {split: f"{self.output_prefix}_{split}" for split in SPLITS}


def preprocess(config: PreprocessConfig) -> DatasetMeta:
    """Tokenise `config.input` into `config.output_prefix`; returns what meta.json then says.

    Raises InputError for bad input, an existing output or input without a document, and RunError for a full disk or a worker that died;
    then no output appears, and the same command goes on from what was done.
    """
    _check_places(config, overwrite=True)  # before the tokenizer is loaded and the input listed, which may take a while
    with writing_dataset(config.output_prefix):
        tokenizer = _load_tokenizer(config)
        sources = find_sources(config.input)
        if config.document_separator is not None and not any(isinstance(source, TextFile) for source in sources):
            raise InputError(f"--document_separator={config.document_separator!r} goes with .txt files, of which there are none")
        job = _Job(config, tokenizer, sources)
        meta = job.run()
    _report(config.output_prefix, meta, job.progress)
    return meta


def _check_places(config: PreprocessConfig, *, overwrite: bool) -> None:
    bare = idx_path(config.output_prefix)
    if bare.exists():
        raise InputError(f"--output_prefix={config.output_prefix}: {bare} is there, a pair that meta.json would vouch for; choose another")
    paths = [path(prefix) for prefix in config.prefixes.values() for path in (bin_path, idx_path)] + [meta_path(config.output_prefix)]
    check_output("output_prefix", config.output_prefix, *paths, overwrite=overwrite)


def _load_tokenizer(config: PreprocessConfig):
    if config.sentencepiece is not None:
        tokenizer, name = SentencePieceTokenizer(config.sentencepiece), f"--sentencepiece={config.sentencepiece}"
    else:
        tokenizer, name = load_tokenizer(config.tokenizer, config.tokenizer_revision, option="tokenizer"), f"--tokenizer={config.tokenizer}"
    if tokenizer.eos_token_id is None:
        raise InputError(f"{name} has no end-of-text token (eos_token)")
    return tokenizer


class _Job:
    """One dataset to make, from wherever an earlier start has left it."""

    def __init__(self, config: PreprocessConfig, tokenizer, sources: list[Source]):
        self._config = config
        self._sources = sources
        self._digest = sentencepiece_digest(tokenizer) if config.sentencepiece else tokenizer_digest(tokenizer)
        self._largest_id = max(tokenizer.get_vocab().values())
        self._settings = EncoderSettings(
            tokenizer_json=None if config.sentencepiece else tokenizer.backend_tokenizer.to_str(),
            sentencepiece=config.sentencepiece,
            dtype=token_dtype(self._largest_id),
            eod_id=tokenizer.eos_token_id,
            append_eod=config.append_eod,
            text_key=config.text_key,
            on_bad_line=config.on_bad_line,
            seed=config.seed,
            val_fraction=config.val_fraction,
        )
        self._journal = Journal(unfinished_path(config.output_prefix), self._task())
        self.progress: PreprocessProgress | None = None
        """What this process has encoded, if anything."""

    def run(self) -> DatasetMeta:
        """The dataset's meta, once it is there."""
        state = self._unfinished()
        if state is not None and state["meta"] is not None:
            with contextlib.ExitStack() as stack:
                for prefix in self._config.prefixes.values():
                    stack.enter_context(PairFiles(prefix, keep=True))
                return self._publish(_meta_of(state["meta"]))
        _check_places(self._config, overwrite=self._config.overwrite)
        totals = _Totals() if state is None else _Totals(**state["totals"])
        if state is not None:
            again = f"; {self._sources[totals.source].name} is read again up to there" if totals.source < len(self._sources) else ""
            logger.info("going on after %d documents of an unfinished run%s", totals.num_documents, again)
        try:
            with contextlib.ExitStack() as stack:
                writers = {}
                for split, prefix in self._config.prefixes.items():
                    written = None if state is None else totals.written(split)
                    writers[split] = stack.enter_context(IndexedDatasetWriter(prefix, self._settings.dtype, resume_at=written))
                self._encode(writers, totals)
                meta = self._publish(self._finish(writers, totals))
                for writer in writers.values():
                    writer.close()
                return meta
        except BaseException:
            if self._journal.path.exists():
                logger.info("what was done so far is kept; the same command goes on from there")
            raise

    def _finish(self, writers: dict[str, IndexedDatasetWriter], totals: "_Totals") -> DatasetMeta:
        """Write what is left to write; from here on there is nothing to do but rename."""
        if totals.num_documents == 0:
            skipped = ", ".join(f"{count} {reason}" for reason, count in totals.skipped.items()) or "no records"
            raise InputError(f"no document in --input {' '.join(self._config.input)} ({skipped})")
        for writer in writers.values():
            writer.prepare()
            writer.commit()
        meta = self._meta(totals)
        self._journal.save({"totals": asdict(totals), "meta": asdict(meta), "files": self._prepared()})
        return meta

    def _prepared(self) -> dict[str, str]:
        """What tells the files that are ready to be published from others of their names."""
        return {name: digest for prefix in self._config.prefixes.values() for name, digest in prepared_files(prefix).items()}

    def _task(self) -> dict:
        """What decides the result, by the names that a user knows; of the inputs what can be known without reading them."""
        config = self._config
        identities = json.dumps([source.identity() for source in self._sources])
        sizes = [source.size for source in self._sources if source.size is not None]
        inputs = f"{len(self._sources)} sources of {sum(sizes)} bytes ({hashlib.sha256(identities.encode()).hexdigest()[:12]})"
        options = {f"--{name}": getattr(config, name) for name in _CONTENT_OPTIONS}
        return {"--input": inputs, "tokenizer": self._digest, **options, "format": _FORMAT}

    def _unfinished(self) -> dict | None:
        """Where an earlier start has got to; None begins anew."""
        state = self._without_bad_lines() if self._settings.on_bad_line == "skip" else None
        try:
            state = state or self._journal.load()
            if state is None or self._is_there(state):
                return state
            raise InputError(f"files of the unfinished work that {self._journal.path} tells of are gone; begin anew with --overwrite")
        except InputError as error:
            if not self._config.overwrite:
                raise
            logger.warning("--overwrite: unfinished work is thrown away (%s)", error)
            for prefix in self._config.prefixes.values():
                remove_unfinished(prefix)
            self._journal.remove()
            return None

    def _is_there(self, state: dict) -> bool:
        """Whether the files of an unfinished run still hold what it had written."""
        prefixes = self._config.prefixes
        try:
            if state["meta"] is not None:
                return state["files"] == self._prepared()
            totals = _Totals(**state["totals"])
            assert 0 <= totals.source <= len(self._sources) and totals.chunks >= 0
            sizes = [totals.written(split) for split in prefixes]
        except (AssertionError, AttributeError, KeyError, TypeError) as error:
            raise InputError(f"{self._journal.path} is damaged ({type(error).__name__}); begin anew with --overwrite") from None
        return all(can_resume(prefix, self._settings.dtype, *size) for prefix, size in zip(prefixes.values(), sizes, strict=True))

    def _without_bad_lines(self) -> dict | None:
        """Where a start with --on_bad_line error has got to: it has met none so far, so that skipping goes on from there."""
        try:
            return Journal(self._journal.path, self._journal.task | {"--on_bad_line": "error"}).load()
        except InputError:
            return None

    def _encode(self, writers: dict[str, IndexedDatasetWriter], totals: "_Totals") -> None:
        """Read what is left of the input into the writers, and commit now and then."""
        with contextlib.ExitStack() as stack:
            self.progress = stack.enter_context(PreprocessProgress(self._sources, totals.source))
            chunks = stack.enter_context(contextlib.closing(self._chunks(totals.source, totals.chunks)))
            encoded = stack.enter_context(contextlib.closing(encode_in_order(chunks, self._settings, self._config.workers)))
            due = time.monotonic() + _COMMIT_SECONDS
            for chunk, result in encoded:
                totals.add(chunk.source, self._sources, result)
                for split, part in result.parts.items():
                    writers[split].add_documents(part.tokens, part.sizes)
                self.progress.update(chunk, result)
                if time.monotonic() >= due:
                    started = time.monotonic()
                    for writer in writers.values():
                        writer.commit()
                    self._journal.save({"totals": asdict(totals), "meta": None})
                    took = time.monotonic() - started
                    due = time.monotonic() + max(_COMMIT_SECONDS, took / _COMMIT_SHARE)
        totals.finish(self._sources)

    def _chunks(self, first_source: int, skip: int):
        reading = Reading(self._config.text_key, self._config.document_separator)
        for number, source in enumerate(self._sources[first_source:], first_source):
            with contextlib.closing(source.chunks(reading)) as chunks:
                again = skip if number == first_source else 0
                if sum(1 for _ in itertools.islice(chunks, again)) < again:
                    raise InputError(f"{source.name} is shorter than what was read of it before; begin anew with --overwrite")
                yield from chunks

    def _meta(self, totals: "_Totals") -> DatasetMeta:
        splits = {}
        for split, prefix in self._config.prefixes.items():
            splits[split] = SplitMeta(
                **totals.splits[split], tokens_per_document=tokens_per_document(written_sizes(prefix)), bin_sha256=written_digest(prefix)
            )
        return DatasetMeta(
            tokenizer_digest=self._digest,
            tokenizer_name=self._config.tokenizer or self._config.sentencepiece,
            vocab_size=self._largest_id + 1,
            eod_id=self._settings.eod_id,
            splits=splits,
            skipped=dict(sorted(totals.skipped.items())),
            source=totals.inputs,
            options={name: getattr(self._config, name) for name in _CONTENT_OPTIONS},
        )

    def _publish(self, meta: DatasetMeta) -> DatasetMeta:
        """Make the dataset appear, and forget how it was made."""
        publish_dataset(self._config.output_prefix, meta)
        self._journal.remove()
        return meta


def _meta_of(values: dict) -> DatasetMeta:
    return DatasetMeta(**(values | {"splits": {name: SplitMeta(**counts) for name, counts in values["splits"].items()}}))


@dataclass
class _Totals:
    """How far the input has been read, and what was counted; plain values, which the journal keeps."""

    source: int = 0
    """Number of the source that is being read."""
    chunks: int = 0
    """Of it, that have been written."""
    inputs: list[dict] = field(default_factory=list)
    """What meta.json says of each word of --input whose sources have been read to their ends."""
    words: list[str] = field(default_factory=list)
    """Those words."""
    skipped: dict[str, int] = field(default_factory=dict)
    splits: dict[str, dict[str, int]] = field(default_factory=lambda: {split: dict.fromkeys(COUNTS, 0) for split in SPLITS})

    @property
    def num_documents(self) -> int:
        """Documents of all splits."""
        return sum(counts["documents"] for counts in self.splits.values())

    def written(self, split: str) -> tuple[int, int]:
        """Documents and tokens of one split."""
        return self.splits[split]["documents"], self.splits[split]["tokens"]

    def add(self, source: str, sources: list[Source], result: Encoded) -> None:
        """Count one chunk of a source; those before it have come to their end."""
        while sources[self.source].name != source:
            self._add_record(sources[self.source])
        self.chunks += 1
        for reason, count in result.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count
        for split, part in result.parts.items():
            found = (len(part.sizes), len(part.tokens), part.text_bytes, part.words, part.eod_tokens)
            for name, count in zip(COUNTS, found, strict=True):
                self.splits[split][name] += count

    def finish(self, sources: list[Source]) -> None:
        """All sources have come to their end."""
        while self.source < len(sources):
            self._add_record(sources[self.source])

    def _add_record(self, source: Source) -> None:
        """Note what was read; of several files that one word stands for, their number, their bytes and a digest of their digests."""
        record = source.record()
        if self.words[-1:] == [source.given]:
            before = self.inputs[-1]
            digests = " ".join(str(part.get("sha256", part.get("fingerprint"))) for part in (before, record))
            chained = hashlib.sha256(os.fsencode(f"{digests} {record['name']}")).hexdigest()
            files, size = before.get("files", 1) + 1, before.get("bytes", 0) + record.get("bytes", 0)
            self.inputs[-1] = {"name": Path(source.given.split("=", 1)[1]).name, "files": files, "bytes": size, "sha256": chained}
        else:
            self.inputs.append(record)
            self.words.append(source.given)
        self.source, self.chunks = self.source + 1, 0


def _report(prefix: str, meta: DatasetMeta, progress: PreprocessProgress | None) -> None:
    for split, counts in meta.splits.items():
        logger.info("%s_%s: %s", prefix, split, describe(counts))
    if meta.skipped:
        logger.info("left out: %s", ", ".join(f"{count} {reason}" for reason, count in meta.skipped.items()))
    for split, counts in meta.splits.items():
        if counts.documents == 0:
            whole = " (a text file is one document, unless --document_separator parts it)" if _documents(meta) == 1 else ""
            logger.warning("no document fell into the %s split%s; change --val_fraction (or --seed) or give more text", split, whole)
    logger.info("wrote %s%s", meta_path(prefix), f" in {progress.describe()}" if progress else "")


def _documents(meta: DatasetMeta) -> int:
    return sum(counts.documents for counts in meta.splits.values())
