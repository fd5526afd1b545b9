"""Cutting what a source holds into pieces of about a megabyte: lines, texts, rows, and the columns of Arrow tables."""

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence

from megahedge.data.documents import BYTE_ORDER_MARK, Utf8
from megahedge.utils.errors import InputError

_CHUNK_BYTES = 1 << 20
_CHUNK_RECORDS = 2048  # of rows and of archives' members, which may all be small


class HashingReader(io.RawIOBase):
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


def line_blocks(stream: io.BufferedReader) -> Iterator[bytes]:
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


def separated_texts(stream: io.BufferedReader, separator: bytes) -> Iterator[bytes]:
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
        yield _without_last_break(b"".join(lines))


def _without_last_break(text: bytes) -> bytes:
    return text.removesuffix(b"\n").removesuffix(b"\r")


def grouped(items: Iterable, size) -> Iterator[tuple[int, list]]:
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


def check_column(name: str, schema, text_key: str) -> None:
    """Raise InputError unless an Arrow schema has the column, or a field of that path in a struct."""
    if list(schema.names).count(text_key) > 1:
        raise InputError(f"{name} has several columns {text_key!r}; --text_key must name one")
    fields = list(schema)
    for part in [text_key] if text_key in schema.names else text_key.split("."):
        found = next((field for field in fields if field.name == part), None)
        if found is None:
            raise InputError(f"{name} has no column {text_key!r}; --text_key can be one of {list(schema.names)}")
        fields = [found.type.field(index) for index in range(found.type.num_fields)]


def top_column(names: Sequence[str], text_key: str) -> str:
    return text_key if text_key in names else text_key.split(".")[0]


def column_values(column) -> list:
    """The texts of an Arrow column as their bytes, which may not be UTF-8; what is no text as it is."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
        column = column.cast(pyarrow.large_binary())
        return [None if value is None else Utf8(value) for value in column.to_pylist()]
    return column.to_pylist()


def text_column(batch, text_key: str):
    """The texts in an Arrow table or batch, those within a struct included."""
    import pyarrow.compute

    if text_key in batch.schema.names:
        return batch.column(text_key)
    first, *rest = text_key.split(".")
    return pyarrow.compute.struct_field(batch.column(first), rest)
