"""Readers of text: jsonl files, plain or gzipped, `datasets` folders and hub datasets, as numbered records in bounded chunks.

The reading process only cuts files into lines; decoding a record (`record_text`) is left to whoever tokenises it.
A new file kind is one more entry in `_LINE_SUFFIXES` and, if it is compressed, one more opener in `_open_lines`.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megahedge.utils.errors import InputError

_LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson", ".ndjson.gz")
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DATASETS_MARKERS = ("dataset_info.json", "dataset_dict.json", "state.json")
_INPUTS = ".jsonl or .jsonl.gz files, a glob, a folder of them, a folder saved by `datasets`, or the name of a hub dataset"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CHUNK_BYTES = 1 << 20
_CHUNK_RECORDS = 2048


class BadRecord(ValueError):  # noqa: N818 (an everyday event, not an error of the program)
    """A record that holds no document.  `reason` is a short name under which such records are counted."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of one source: lines as bytes, or texts."""

    source: str
    first: int
    """Number of the first record in its source, from 1: the line of a file, the row of a dataset."""
    records: list[bytes | str | None]
    num_bytes: int
    """Bytes of the records, for progress."""

    def where(self, index: int) -> str:
        """`file:line` of a record."""
        return f"{self.source}:{self.first + index}"


def find_sources(inputs: Sequence[str], option: str = "input") -> list["Source"]:
    """The sources that a list of files, globs, folders, `datasets` folders and hub names stands for, each once, in order.

    option: the command-line option that they come from.
    Raises InputError for one that does not exist, is of no known kind, or holds nothing.
    """
    sources = {}
    for name in inputs:
        for source in _expand(name, f"--{option}={name}"):
            sources.setdefault(source.name, source)
    if not sources:
        raise InputError(f"--{option} is empty; name at least one file, folder or dataset")
    return list(sources.values())


def _expand(name: str, given: str) -> list["Source"]:
    """Sources of one name; `given` is that name as error messages say it."""
    if not name.strip():
        raise InputError(f"{given} is empty; give {_INPUTS}")
    path = Path(name)
    if os.path.isdir(name):  # unlike Path.is_dir, false for a name that is too long
        if any((path / marker).is_file() for marker in _DATASETS_MARKERS):
            return [DatasetFolder(name)]
        files = sorted(file for file in path.rglob("*") if file.is_file() and _is_lines(file))
        if not files:
            raise InputError(f"{given} holds no file ending in {', '.join(_LINE_SUFFIXES)} and is not a saved `datasets` folder")
        return [LineFile(str(file)) for file in files]
    if os.path.exists(name):
        return [_line_file(path, given)]
    if any(character in name for character in "*?["):
        return [_line_file(match, given) for match in _matches(path, given)]
    if _HUB_NAME.fullmatch(name) and not _is_lines(path):
        return [HubDataset(name, given)]
    raise InputError(f"{given} does not exist; give {_INPUTS}")


def _matches(pattern: Path, given: str) -> list[Path]:
    try:
        found = sorted(match for match in Path(pattern.anchor or ".").glob(str(pattern.relative_to(pattern.anchor))) if match.is_file())
    except (ValueError, OSError) as error:
        raise InputError(f"{given} is no pattern that can be searched: {error}") from None
    if not found:
        raise InputError(f"{given} matches no file")
    return found


def _is_lines(path: Path) -> bool:
    return path.name.lower().endswith(_LINE_SUFFIXES)


def _line_file(path: Path, given: str) -> "LineFile":
    if not _is_lines(path):
        raise InputError(f"{given}: {path} is of an unknown kind; inputs end in {', '.join(_LINE_SUFFIXES)}, one JSON object a line")
    return LineFile(str(path))


class Source:
    """Somewhere documents come from."""

    def __init__(self, name: str):
        self.name = name
        self._record = {"name": Path(name).name}

    def chunks(self, text_key: str) -> Iterator[Chunk]:
        """All records, in order.  Raises InputError for a source that cannot be read."""
        raise NotImplementedError

    def record(self) -> dict:
        """What meta.json says of this source, once it has been read to its end."""
        return self._record


class LineFile(Source):
    """A file with one JSON object a line, gzipped or not."""

    def chunks(self, text_key: str) -> Iterator[Chunk]:
        """Lines as bytes; a byte order mark is dropped.  gzip is recognised by its content."""
        del text_key  # lines are decoded later
        line_number = 0
        try:
            with open(self.name, "rb") as handle:
                hashing = _HashingReader(handle)
                for chunk in _cut(self.name, _without_mark(_open_lines(self.name, hashing)), len):
                    line_number = chunk.first + len(chunk.records) - 1
                    yield chunk
                self._record |= {"bytes": handle.tell(), "sha256": hashing.hexdigest()}
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{self.name}: gzip stream damaged or cut off after line {line_number} or later ({error})") from None
        except OSError as error:
            raise InputError(f"cannot read {self.name}: {error.strerror or error}") from None


class _HashingReader(io.RawIOBase):
    """Passes a file's bytes on and digests them on the way."""

    def __init__(self, handle):
        self._handle = handle
        self._digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._handle.readinto(buffer)
        self._digest.update(memoryview(buffer)[:count])
        return count

    def hexdigest(self) -> str:
        """SHA-256 of the whole file, what no one has read included."""
        while block := self._handle.read(1 << 20):
            self._digest.update(block)
        return self._digest.hexdigest()


def _open_lines(name: str, raw: io.RawIOBase) -> Iterable[bytes]:
    buffered = io.BufferedReader(raw, 1 << 20)
    head = buffered.peek(len(_GZIP_MAGIC))
    if head.startswith(_GZIP_MAGIC):
        return io.BufferedReader(gzip.GzipFile(fileobj=buffered), 1 << 20)
    if name.lower().endswith(".gz") and head:
        raise InputError(f"{name} is named .gz but is not gzipped")
    return buffered


def _without_mark(lines: Iterable[bytes]) -> Iterator[bytes]:
    lines = iter(lines)
    for first in lines:
        yield first.removeprefix(_BYTE_ORDER_MARK)
        break
    yield from lines


class DatasetFolder(Source):
    """A folder written by `datasets.save_to_disk`."""

    def chunks(self, text_key: str) -> Iterator[Chunk]:
        """Texts, in the order of the rows."""
        import datasets

        try:
            dataset = datasets.load_from_disk(self.name)
        except Exception as error:  # whatever the library makes of a damaged folder
            raise InputError(f"{self.name} cannot be read as a saved dataset: {' '.join(str(error).split())}") from None
        if isinstance(dataset, datasets.DatasetDict):
            if "train" not in dataset:
                raise InputError(f"{self.name} has the splits {sorted(dataset)} and none named train; name one, as {self.name}/SPLIT")
            dataset = dataset["train"]
        if text_key not in dataset.column_names:
            raise InputError(f"{self.name} has no column {text_key!r}; --text_key can be one of {dataset.column_names}")
        self._record |= {"rows": len(dataset), "fingerprint": dataset._fingerprint}
        texts = (text for batch in dataset.select_columns([text_key]).iter(256) for text in batch[text_key])
        yield from _cut(self.name, texts, _text_bytes)


class HubDataset(Source):
    """The train split of a dataset on the Hugging Face hub, streamed."""

    def __init__(self, name: str, given: str):
        super().__init__(name)
        self._given = given

    def chunks(self, text_key: str) -> Iterator[Chunk]:
        """Texts, in the order of the stream."""
        import datasets

        try:
            dataset = datasets.load_dataset(self.name, split="train", streaming=True)
        except Exception as error:  # not found, no network, a script that this version of datasets does not run
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"{self._given} is no file or folder here and no hub dataset that can be reached: {first_line}") from None
        self._record = {"name": self.name, "hub": True}
        yield from _cut(self.name, (self._text(row, text_key) for row in dataset), _text_bytes)

    def _text(self, row: dict, text_key: str) -> str | None:
        if text_key not in row:
            raise InputError(f"{self.name} has no column {text_key!r}; --text_key can be one of {sorted(row)}")
        return row[text_key]


def _text_bytes(text) -> int:
    return len(text) if isinstance(text, str) else 0


def _cut(source: str, records: Iterable, size) -> Iterator[Chunk]:
    """Group records into chunks of about a megabyte, so that what is in flight is bounded by bytes, not by documents."""
    pending, pending_bytes, first = [], 0, 1
    for record in records:
        pending.append(record)
        pending_bytes += size(record)
        if pending_bytes >= _CHUNK_BYTES or len(pending) >= _CHUNK_RECORDS:
            yield Chunk(source, first, pending, pending_bytes)
            first += len(pending)
            pending, pending_bytes = [], 0
    if pending:
        yield Chunk(source, first, pending, pending_bytes)


def record_text(record: bytes | str | None, text_key: str) -> str:
    """The document in a record.

    Raises BadRecord with reason `empty` for a blank line or a text of nothing but white space, and with `invalid_utf8`, `invalid_json`,
    `missing_key` or `not_text` for a record that should not be there.
    """
    text = _line_text(record, text_key) if isinstance(record, bytes) else record
    if not isinstance(text, str):
        raise BadRecord("not_text", f"{text_key!r} is {json.dumps(text, default=repr)[:40]}, not a text")
    if not text or text.isspace():
        raise BadRecord("empty", "empty document")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRecord("invalid_utf8", f"{text_key!r} holds half of a surrogate pair, which is no character") from None
    return text


def _line_text(line: bytes, text_key: str) -> object:
    if not line or line.isspace():
        raise BadRecord("empty", "blank line")
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRecord("invalid_utf8", f"invalid UTF-8 at byte {error.start + 1} of the line") from None
    except (ValueError, RecursionError) as error:
        raise BadRecord("invalid_json", f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadRecord("invalid_json", f"a JSON {type(record).__name__}, not an object with the key {text_key!r}")
    if text_key not in record:
        raise BadRecord("missing_key", f"no key {text_key!r}; this record has {sorted(record)[:10]} (see --text_key)")
    return record[text_key]


def iterate_texts(inputs: Sequence[str], text_key: str = "text", option: str = "input") -> Iterator[str]:
    """Every document of some inputs, one after another; empty ones are left out.

    Raises InputError with `file:line` for a malformed record.
    """
    for source in find_sources(inputs, option):
        with contextlib.closing(source.chunks(text_key)) as chunks:
            for chunk in chunks:
                for index, record in enumerate(chunk.records):
                    try:
                        yield record_text(record, text_key)
                    except BadRecord as bad:
                        if bad.reason != "empty":
                            raise InputError(f"{chunk.where(index)}: {bad}") from None
