"""Records and the documents in them: bounded chunks of what a source holds, cut by one process and decoded by others.

A chunk is what travels from the process that reads to one that tokenises, so it holds bytes as they were read; finding lines, JSON,
archives and text in them is left to whoever tokenises it.  A new shape of input is one more subclass of Chunk.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from megahedge.data.compression import DamagedStream, open_decompressed

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MAX_DEPTH = 3  # archives in archives in archives


class BadRecord(ValueError):  # noqa: N818 (an everyday event, not an error of the program)
    """A record that holds no document.  `reason` is a short name under which such records are counted."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of one source."""

    source: str
    num_bytes: int
    """Bytes of the records, for progress."""
    position: int
    """Bytes of the source that have been read by the end of this chunk, for progress."""

    def documents(self, text_key: str) -> Iterator[tuple[str, str | BadRecord]]:
        """Where each record stands (`file:line` and the like), and its text or why it has none."""
        raise NotImplementedError


@dataclass(frozen=True)
class JsonLines(Chunk):
    """Whole lines of a file, one JSON object each."""

    first: int
    """Number of the first line, from 1."""
    lines: bytes

    def documents(self, text_key: str) -> Iterator[tuple[str, str | BadRecord]]:
        """See Chunk."""
        lines = self.lines.split(b"\n")
        if not lines[-1]:
            lines.pop()  # what follows the end of the last line
        for number, line in enumerate(lines, self.first):
            yield f"{self.source}:{number}", _attempt(lambda line=line: checked_text(_line_value(line, text_key), text_key))


@dataclass(frozen=True)
class Rows(Chunk):
    """Texts of rows of a table."""

    first: int
    """Number of the first row, from 1."""
    texts: list

    def documents(self, text_key: str) -> Iterator[tuple[str, str | BadRecord]]:
        """See Chunk."""
        for number, text in enumerate(self.texts, self.first):
            yield f"{self.source}:{number}", _attempt(lambda text=text: checked_text(text, text_key))


@dataclass(frozen=True)
class PlainTexts(Chunk):
    """Documents of a text file."""

    first: int
    """Number of the first document in the file, from 1; 0 for a file that is one document."""
    texts: list[bytes]

    def documents(self, text_key: str) -> Iterator[tuple[str, str | BadRecord]]:
        """See Chunk."""
        for number, text in enumerate(self.texts, self.first):
            where = f"{self.source}, document {number}" if self.first else self.source
            yield where, _attempt(lambda text=text: _decoded(text))


@dataclass(frozen=True)
class Members(Chunk):
    """Files of an archive, or an archive as a whole: each is a document, or an archive of such."""

    members: list[tuple[str, bytes]]
    """Name and content."""

    def documents(self, text_key: str) -> Iterator[tuple[str, str | BadRecord]]:
        """See Chunk."""
        for name, content in self.members:
            try:
                for path, text in _texts_within(name, content, _MAX_DEPTH):
                    yield self._where(path), _attempt(lambda text=text: _decoded(text))
            except DamagedStream as error:
                yield self._where(name), BadRecord("damaged", str(error))

    def _where(self, path: str) -> str:
        return f"{self.source}/{path}" if path else self.source


def _texts_within(name: str, content: bytes, depth: int) -> Iterator[tuple[str, bytes]]:
    """Path and bytes of each text in a file that may be an archive, compressed or not.  Raises DamagedStream."""
    stream = open_decompressed(name, io.BytesIO(content))
    if not is_archive(stream):
        yield name, stream.read()
        return
    if depth == 0:
        raise DamagedStream("archives lie too deep in archives")
    for member, inner in archive_members(stream):
        yield from _texts_within(f"{name}/{member}" if name else member, inner, depth - 1)


def is_archive(stream: io.BufferedReader) -> bool:
    """Whether a tar archive begins here; nothing is consumed."""
    return stream.peek(512)[257:262] == b"ustar"


class _Member(tarfile.TarInfo):
    """A member whose header must be there: tarfile takes an archive that is cut off between two members for its end."""

    @classmethod
    def fromtarfile(cls, archive):
        try:
            return super().fromtarfile(archive)
        except (tarfile.EmptyHeaderError, tarfile.TruncatedHeaderError):
            raise DamagedStream("the archive ends without its end mark") from None


def archive_members(stream: io.BufferedReader) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file in a tar archive, in its order.  Raises DamagedStream where it cannot be read."""
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
            for member in archive:
                if member.isfile():
                    yield member.name, archive.extractfile(member).read()
    except tarfile.TarError as error:
        raise DamagedStream(f"not a sound tar archive ({error})") from None


def _attempt(text) -> str | BadRecord:
    try:
        return text()
    except BadRecord as bad:
        return bad


def checked_text(text: object, text_key: str) -> str:
    """The document, if it is one.

    Raises BadRecord with reason `empty` for a text of nothing but white space, `not_text` for anything else than a text, and `invalid_utf8`
    for one that cannot be encoded.
    """
    if not isinstance(text, str):
        raise BadRecord("not_text", f"{text_key!r} is {json.dumps(text, default=repr)[:40]}, not a text")
    if not text or text.isspace():
        raise BadRecord("empty", "empty document")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRecord("invalid_utf8", f"{text_key!r} holds half of a surrogate pair, which is no character") from None
    return text


def _decoded(text: bytes) -> str:
    try:
        decoded = text.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        raise BadRecord("invalid_utf8", f"invalid UTF-8 at byte {error.start + 1}") from None
    if not decoded or decoded.isspace():
        raise BadRecord("empty", "empty document")
    return decoded


def _line_value(line: bytes, text_key: str) -> object:
    """What a line has under `text_key`.

    Raises BadRecord with reason `empty` for a blank line, and with `invalid_utf8`, `invalid_json` or `missing_key` for one that should not
    be there.
    """
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
    return _entry(record, text_key)


def _entry(record: dict, text_key: str) -> object:
    """The entry of that name, or the one that its parts between dots lead to."""
    if text_key in record:
        return record[text_key]
    value, path = record, text_key.split(".")
    for depth, part in enumerate(path):
        if not isinstance(value, dict) or part not in value:
            within = f"{'.'.join(path[:depth])!r}" if depth else "this record"
            has = sorted(value)[:10] if isinstance(value, dict) else f"a {type(value).__name__}"
            raise BadRecord("missing_key", f"no key {text_key!r}; {within} has {has} (see --text_key)")
        value = value[part]
    return value
