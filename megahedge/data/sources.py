"""Where text comes from: JSON lines, plain text, tables and archives in files, saved `datasets` and the Hugging Face hub.

The reading process only cuts a source into chunks; decoding them is left to whoever tokenises (see megahedge/data/documents.py).
A new kind of file is one more class here, and one more entry in `_KINDS` of find_sources.py.
"""

import contextlib
import functools
import hashlib
import io
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megahedge.data.compression import DamagedStream, compression_suffix, open_decompressed
from megahedge.data.cutting import (
    HashingReader,
    check_column,
    column_values,
    grouped,
    line_blocks,
    separated_texts,
    text_column,
    top_column,
)
from megahedge.data.documents import (
    BYTE_ORDER_MARK,
    NO_ARCHIVE,
    Chunk,
    JsonLines,
    Members,
    PlainTexts,
    Rows,
    Utf8,
    archive_members,
    is_archive,
    nested,
)
from megahedge.utils.errors import InputError, RunError
from megahedge.utils.files import sha256_file
from megahedge.utils.logging import get_logger

logger = get_logger(__name__)

_WHOLE_ARCHIVE_BYTES = 8 << 20
"""Up to this size an archive travels whole, so that the workers decompress it."""


@dataclass(frozen=True)
class Reading:
    """Options of reading that some kinds of source need."""

    text_key: str = "text"
    document_separator: str | None = None


class Source:
    """Somewhere documents come from."""

    size: int | None = None
    """Bytes on the disk, where that is known."""

    def __init__(self, name: str, given: str = ""):
        self.name = name
        self.given = given
        """The word of the command line that stands for it."""
        self._record = {"name": Path(name).name}

    def chunks(self, reading: Reading) -> Iterator[Chunk]:
        """All records, in order and always cut in the same places.  Raises InputError for a source that cannot be read."""
        raise NotImplementedError

    def record(self) -> dict:
        """What meta.json says of this source, once it has been read to its end."""
        return self._record

    def identity(self) -> list:
        """What tells whether it is still the same one, without reading it."""
        return [self.name]


class FileSource(Source):
    """A file, which is digested while it is read."""

    def __init__(self, name: str, given: str = ""):
        super().__init__(name, given)
        with self._reading():
            status = os.stat(name)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{name} is no ordinary file, which could be read again after an interruption; write it to one")
        self.size = status.st_size
        self._changed = status.st_mtime_ns

    def identity(self) -> list:
        """Name, size and time of change."""
        return [self.name, self.size, self._changed]

    def _check_unchanged(self) -> None:
        """Raise InputError where the file is not the one that it was at the start."""
        with self._reading():
            status = os.stat(self.name)
        if (status.st_size, status.st_mtime_ns) != (self.size, self._changed):
            raise InputError(f"{self.name} has changed while it was read; begin anew with --overwrite once it is complete")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """What goes wrong within is a fault of this file."""
        try:
            yield
        except DamagedStream as error:
            raise InputError(f"{self.name} is damaged or cut off ({error})") from None
        except OSError as error:
            raise InputError(f"cannot read {self.name}: {error.strerror or error}") from None


class StreamFile(FileSource):
    """A file that is read from its first byte to its last, compressed or not."""

    def chunks(self, reading: Reading) -> Iterator[Chunk]:
        """See Source."""
        with self._reading(), open(self.name, "rb") as handle:
            raw = HashingReader(handle)
            yield from self._cut(open_decompressed(self.name, raw), raw, reading)
            self._record |= {"bytes": self.size, "sha256": raw.hexdigest()}
        self._check_unchanged()

    def _cut(self, stream: io.BufferedReader, raw: HashingReader, reading: Reading) -> Iterator[Chunk]:
        raise NotImplementedError


class LineFile(StreamFile):
    """One JSON object a line."""

    def _cut(self, stream, raw, reading):
        first = 1
        for block in line_blocks(stream):
            if first == 1:
                block = block.removeprefix(BYTE_ORDER_MARK)
            yield JsonLines(self.name, len(block), raw.position, first, block)
            first += block.count(b"\n")


class TextFile(StreamFile):
    """Plain text: one document, or several with a line between them that is --document_separator."""

    def _cut(self, stream, raw, reading):
        if reading.document_separator is None:
            text = stream.read()
            yield PlainTexts(self.name, len(text), raw.position, 0, [text])
            return
        texts = separated_texts(stream, reading.document_separator.encode())
        for first, group in grouped(texts, len):
            yield PlainTexts(self.name, sum(map(len, group)), raw.position, first, group)


class ArchiveFile(StreamFile):
    """A tar archive of texts, or of archives of texts, as OpenWebText is published; compressed or not."""

    def _cut(self, stream, raw, reading):
        if not is_archive(stream):
            raise DamagedStream(NO_ARCHIVE)
        yield from self._members(stream, raw)

    def chunks(self, reading: Reading) -> Iterator[Chunk]:
        """See Source."""
        if self.size > _WHOLE_ARCHIVE_BYTES or not compression_suffix(self.name):
            yield from super().chunks(reading)
            return
        with self._reading():
            content = Path(self.name).read_bytes()
            yield Members(self.name, len(content), len(content), [("", content)])
            self._record |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        self._check_unchanged()

    def _members(self, stream, raw):
        for _, group in grouped(archive_members(stream), lambda member: len(member[1])):
            yield Members(self.name, sum(len(content) for _, content in group), raw.position, group)


class ParquetFile(FileSource):
    """A table with one document a row."""

    def chunks(self, reading: Reading) -> Iterator[Chunk]:
        """See Source."""
        import pyarrow
        from pyarrow import parquet

        with self._reading():
            digest = sha256_file(self.name)
        try:
            with parquet.ParquetFile(self.name) as table:
                check_column(self.name, table.schema_arrow, reading.text_key)
                num_rows = max(1, table.metadata.num_rows)
                batches = table.iter_batches(batch_size=256, columns=[reading.text_key])
                texts = (text for batch in batches for text in column_values(text_column(batch, reading.text_key)))
                yield from _rows(self, texts, num_rows)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise InputError(f"{self.name} cannot be read as parquet: {' '.join(str(error).split())}") from None
        self._record |= {"bytes": self.size, "sha256": digest}
        self._check_unchanged()


class DatasetFolder(Source):
    """A folder written by `datasets.save_to_disk`."""

    def __init__(self, name: str, given: str = ""):
        super().__init__(name, given)
        files = [file for file in Path(name).rglob("*") if file.is_file()]
        self.size = sum(file.stat().st_size for file in files)
        self._changed = max((file.stat().st_mtime_ns for file in files), default=0)

    def identity(self) -> list:
        """Name, size and time of change."""
        return [self.name, self.size, self._changed]

    def chunks(self, reading: Reading) -> Iterator[Chunk]:
        """See Source."""
        import datasets

        try:
            dataset = datasets.load_from_disk(self.name)
        except Exception as error:  # whatever the library makes of a damaged folder
            raise InputError(f"{self.name} cannot be read as a saved dataset: {' '.join(str(error).split())}") from None
        if isinstance(dataset, datasets.DatasetDict):
            if "train" not in dataset:
                raise InputError(f"{self.name} has the splits {sorted(dataset)} and none named train; name one, as {self.name}/SPLIT")
            if len(dataset) > 1:
                others = ", ".join(split for split in dataset if split != "train")
                logger.info("of %s the split train is read; left out: %s (name one, as %s/SPLIT)", self.name, others, self.name)
            dataset = dataset["train"]
        check_column(self.name, dataset.features.arrow_schema, reading.text_key)
        self._record |= {"rows": len(dataset), "fingerprint": dataset._fingerprint}
        columns = dataset.select_columns([top_column(dataset.column_names, reading.text_key)]).with_format("arrow")
        texts = (text for table in columns.iter(256) for text in column_values(text_column(table, reading.text_key)))
        yield from _rows(self, texts, max(1, len(dataset)))


class HubDataset(Source):
    """The train split of a dataset on the Hugging Face hub, streamed."""

    @functools.cached_property
    def _revision(self) -> str | None:
        """Commit that is read, so that a later start goes on with the same one; None where the hub does not say."""
        import huggingface_hub

        try:
            return huggingface_hub.HfApi().dataset_info(self.name).sha
        except Exception:  # no network, not found: what reads it tells of that, or finds it in its cache
            return None

    def identity(self) -> list:
        """Name and commit."""
        return [self.name, self._revision]

    def chunks(self, reading: Reading) -> Iterator[Chunk]:
        """See Source."""
        import datasets

        try:
            dataset = datasets.load_dataset(self.name, split="train", streaming=True, revision=self._revision)
        except Exception as error:  # not found, no network, a script that this version of datasets does not run
            raise InputError(
                f"{self.given} is no file or folder here and no hub dataset that can be reached: {_first_line(error)}"
            ) from None
        self._record |= {"hub": True, "revision": self._revision}
        yield from _rows(self, (self._text(row, reading.text_key) for row in self._read(dataset)))

    def _read(self, dataset) -> Iterator[dict]:
        try:
            yield from dataset
        except Exception as error:  # the client lets errors of its HTTP library through
            raise RunError(f"{self.name}: the hub has ended the stream ({_first_line(error)})") from None

    def _text(self, row: dict, text_key: str) -> object:
        try:
            return nested(row, text_key)
        except KeyError as error:
            raise InputError(f"{self.name} has no column {text_key!r}: {error.args[0]} (see --text_key)") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _rows(source: Source, texts: Iterable, num_rows: int | None = None) -> Iterator[Rows]:
    """Chunks of a table's texts; its position is told by rows."""
    for first, group in grouped(texts, _text_bytes):
        done = first - 1 + len(group)
        position = source.size * done // num_rows if num_rows else 0
        yield Rows(source.name, sum(map(_text_bytes, group)), position, first, group)


def _text_bytes(text) -> int:
    return len(text) if isinstance(text, (str, Utf8)) else 0
