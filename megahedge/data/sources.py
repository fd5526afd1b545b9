"""Where text comes from: JSON lines, plain text, tables and archives in files, saved `datasets` and the Hugging Face hub.

The reading process only cuts a source into chunks; decoding them is left to whoever tokenises (see megahedge/data/documents.py).
A new kind of file is one more class here, and one more entry in `_KINDS`.
"""

import contextlib
import functools
import hashlib
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megahedge.data.compression import MAGIC, DamagedStream, compression_suffix, open_decompressed
from megahedge.data.documents import (
    BYTE_ORDER_MARK,
    LINE_SUFFIXES,
    NO_ARCHIVE,
    BadRecord,
    Chunk,
    JsonLines,
    Members,
    PlainTexts,
    Rows,
    Utf8,
    archive_members,
    is_archive,
    nested,
    suffix_of,
)
from megahedge.utils.errors import InputError, RunError
from megahedge.utils.files import sha256_file

_DATASETS_MARKERS = ("dataset_info.json", "dataset_dict.json", "state.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CHUNK_BYTES = 1 << 20
_CHUNK_RECORDS = 2048  # of rows and of archives' members, which may all be small
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
            raw = _HashingReader(handle)
            yield from self._cut(open_decompressed(self.name, raw), raw, reading)
            self._record |= {"bytes": self.size, "sha256": raw.hexdigest()}
        self._check_unchanged()

    def _cut(self, stream: io.BufferedReader, raw: "_HashingReader", reading: Reading) -> Iterator[Chunk]:
        raise NotImplementedError


class LineFile(StreamFile):
    """One JSON object a line."""

    def _cut(self, stream, raw, reading):
        first = 1
        for block in _line_blocks(stream):
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
        texts = _separated(stream, reading.document_separator.encode())
        for first, group in _grouped(texts, len):
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
        for _, group in _grouped(archive_members(stream), lambda member: len(member[1])):
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
                _check_column(self.name, table.schema_arrow, reading.text_key)
                num_rows = max(1, table.metadata.num_rows)
                batches = table.iter_batches(batch_size=256, columns=[reading.text_key])
                texts = (text for batch in batches for text in _values(_column(batch, reading.text_key)))
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
            dataset = dataset["train"]
        _check_column(self.name, dataset.features.arrow_schema, reading.text_key)
        self._record |= {"rows": len(dataset), "fingerprint": dataset._fingerprint}
        columns = dataset.select_columns([_top_column(dataset.column_names, reading.text_key)]).with_format("arrow")
        texts = (text for table in columns.iter(256) for text in _values(_column(table, reading.text_key)))
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


# ---- finding them -------------------------------------------------------------------------------------------------------------------

_KINDS = {
    **dict.fromkeys(LINE_SUFFIXES, LineFile),
    ".txt": TextFile,
    ".parquet": ParquetFile,
    ".tar": ArchiveFile,
    ".tgz": ArchiveFile,
    ".txz": ArchiveFile,
    ".tbz2": ArchiveFile,
}
"""By the suffix that is left when that of the compression is gone."""
_FILES = f"{', '.join(_KINDS)}, all but .parquet also compressed ({', '.join(MAGIC)}), or archives named as OpenWebText's urlsf_subset00.xz"
_INPUTS = f"files ({_FILES}), a glob, a folder of them, a folder saved by `datasets`, or the name of a hub dataset"


def find_sources(inputs: Sequence[str], option: str = "input") -> list[Source]:
    """The sources that a list of files, globs, folders, `datasets` folders and hub names stands for, each once, in order.

    option: the command-line option that they come from.
    Raises InputError for one that does not exist, is of no known kind, or holds nothing.
    """
    sources = {}
    for name in inputs:
        for source in _expand(name, f"--{option}={name}"):
            sources.setdefault(os.path.realpath(source.name) if isinstance(source, FileSource) else source.name, source)
    if not sources:
        raise InputError(f"--{option} is empty; name at least one file, folder or dataset")
    return list(sources.values())


def _expand(name: str, given: str) -> list[Source]:
    """Sources of one name; `given` is that name as error messages say it."""
    if not name.strip():
        raise InputError(f"{given} is empty; give {_INPUTS}")
    path = Path(name)
    if os.path.isdir(name):  # unlike Path.is_dir, false for a name that is too long
        if any((path / marker).is_file() for marker in _DATASETS_MARKERS):
            return [DatasetFolder(name, given)]
        return [_file(file, given) for file in _files_within(path, given)]
    if os.path.exists(name):
        return [_file(path, given)]
    if any(character in name for character in "*?["):
        return [_file(match, given) for match in _matches(path, given)]
    if _HUB_NAME.fullmatch(name) and not _kind(path):
        return [HubDataset(name, given)]
    raise InputError(f"{given} does not exist; give {_INPUTS}")


def _files_within(folder: Path, given: str) -> list[Path]:
    files = sorted(file for file in _walk(folder) if _kind(file) and not _is_hidden(file.relative_to(folder)))
    for file in files:
        if not file.is_file():
            raise InputError(f"{given}: {file} leads nowhere; remove it, or put back what it names")
    if not files:
        raise InputError(f"{given} holds no file that can be read and is no saved `datasets` folder; files are {_FILES}")
    kinds = {_kind(file): file.name for file in files}
    if len(kinds) > 1:  # such as a README.txt, which is no document
        raise InputError(
            f"{given} holds files of several kinds, {' and '.join(kinds.values())} among them; give a glob, such as {folder}/*.jsonl"
        )
    return files


def _walk(folder: Path) -> Iterator[Path]:
    """Files below a folder, those that links lead to included, each linked folder once."""
    seen = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(parent) / name for name in names)


def _is_hidden(path: Path) -> bool:
    """Whether a part of the path begins with a dot, as copies and caches of editors do."""
    return any(part.startswith(".") for part in path.parts if part not in (".", ".."))


def _matches(pattern: Path, given: str) -> list[Path]:
    root = Path(pattern.anchor or ".")
    try:
        matches = (match for match in root.glob(str(pattern.relative_to(pattern.anchor))) if match.is_file())
        found = sorted(match for match in matches if _is_hidden(pattern) or not _is_hidden(match.relative_to(root)))
    except (ValueError, OSError) as error:
        raise InputError(f"{given} is no pattern that can be searched: {error}") from None
    if not found:
        raise InputError(f"{given} matches no file")
    return found


def _kind(path: Path) -> type[FileSource] | None:
    """The class that reads a file of that name."""
    compression, suffix = compression_suffix(path.name), suffix_of(path.name)
    if compression == ".xz" and suffix not in _KINDS:
        return ArchiveFile  # as those within OpenWebText's archive, which say no more of themselves
    kind = _KINDS.get(suffix)
    return None if compression and kind is ParquetFile else kind


def _file(path: Path, given: str) -> FileSource:
    kind = _kind(path)
    if kind is None:
        raise InputError(f"{given}: {path} is of an unknown kind; files are {_FILES}")
    return kind(str(path), given)


# ---- cutting ------------------------------------------------------------------------------------------------------------------------


class _HashingReader(io.RawIOBase):
    """Passes a file's bytes on and digests them on the way."""

    def __init__(self, handle):
        self._handle = handle
        self._digest = hashlib.sha256()
        self.position = 0
        """Bytes read so far."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._handle.readinto(buffer)
        self._digest.update(memoryview(buffer)[:count])
        self.position += count
        return count

    def hexdigest(self) -> str:
        """SHA-256 of the whole file, what no one has read included."""
        while block := self._handle.read(1 << 20):
            self._digest.update(block)
        return self._digest.hexdigest()


def _line_blocks(stream: io.BufferedReader) -> Iterator[bytes]:
    """Whole lines, a megabyte or a little more of them together."""
    pending = []
    while block := stream.read(_CHUNK_BYTES):
        cut = block.rfind(b"\n") + 1
        if cut == 0:
            pending.append(block)
            continue
        yield b"".join([*pending, block[:cut]])
        pending = [block[cut:]] if cut < len(block) else []
    if pending:
        yield b"".join(pending)


def _separated(stream: io.BufferedReader, separator: bytes) -> Iterator[bytes]:
    """The texts between lines that hold `separator` alone; without the line break before it."""
    lines = []
    if stream.peek(len(BYTE_ORDER_MARK)).startswith(BYTE_ORDER_MARK):
        stream.read(len(BYTE_ORDER_MARK))
    for line in stream:
        if line.rstrip(b"\r\n") == separator:
            yield _without_last_break(b"".join(lines))
            lines = []
        else:
            lines.append(line)
    if lines:
        yield b"".join(lines)


def _without_last_break(text: bytes) -> bytes:
    return text.removesuffix(b"\n").removesuffix(b"\r")


def _grouped(items: Iterable, size) -> Iterator[tuple[int, list]]:
    """Groups of about a megabyte, so that what is in flight is bounded by bytes, with the number of their first item, from 1."""
    pending, pending_bytes, first = [], 0, 1
    for item in items:
        pending.append(item)
        pending_bytes += size(item)
        if pending_bytes >= _CHUNK_BYTES or len(pending) >= _CHUNK_RECORDS:
            yield first, pending
            first += len(pending)
            pending, pending_bytes = [], 0
    if pending:
        yield first, pending


def _rows(source: Source, texts: Iterable, num_rows: int | None = None) -> Iterator[Rows]:
    """Chunks of a table's texts; its position is told by rows."""
    for first, group in _grouped(texts, _text_bytes):
        done = first - 1 + len(group)
        position = source.size * done // num_rows if num_rows else 0
        yield Rows(source.name, sum(map(_text_bytes, group)), position, first, group)


def _text_bytes(text) -> int:
    return len(text) if isinstance(text, (str, Utf8)) else 0


def _check_column(name: str, schema, text_key: str) -> None:
    """Raise InputError unless an Arrow schema has the column, or a field of that path in a struct."""
    if list(schema.names).count(text_key) > 1:
        raise InputError(f"{name} has several columns {text_key!r}; --text_key must name one")
    fields = list(schema)
    for part in [text_key] if text_key in schema.names else text_key.split("."):
        found = next((field for field in fields if field.name == part), None)
        if found is None:
            raise InputError(f"{name} has no column {text_key!r}; --text_key can be one of {list(schema.names)}")
        fields = [found.type.field(index) for index in range(found.type.num_fields)]


def _top_column(names: Sequence[str], text_key: str) -> str:
    return text_key if text_key in names else text_key.split(".")[0]


def _values(column) -> list:
    """The texts of an Arrow column as their bytes, which may not be UTF-8; what is no text as it is."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
        column = column.cast(pyarrow.large_binary())
        return [None if value is None else Utf8(value) for value in column.to_pylist()]
    return column.to_pylist()


def _column(batch, text_key: str):
    """The texts in an Arrow table or batch, those within a struct included."""
    import pyarrow.compute

    if text_key in batch.schema.names:
        return batch.column(text_key)
    first, *rest = text_key.split(".")
    return pyarrow.compute.struct_field(batch.column(first), rest)


# ---- reading them here --------------------------------------------------------------------------------------------------------------


def iterate_texts(inputs: Sequence[str], text_key: str = "text", option: str = "input") -> Iterator[str]:
    """Every document of some inputs, one after another; empty ones are left out.

    Raises InputError, with where it is, for a record that holds no document.
    """
    for source in find_sources(inputs, option):
        with contextlib.closing(source.chunks(Reading(text_key))) as chunks:
            for chunk in chunks:
                for where, text in chunk.documents(text_key):
                    if not isinstance(text, BadRecord):
                        yield text
                    elif text.reason != "empty":
                        raise InputError(f"{where}: {text}")
