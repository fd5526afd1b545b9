"""Records and the documents in them: bounded chunks of what a source holds, cut by one process and decoded by others.

A chunk is what travels from the process that reads to one that tokenises, so it holds bytes as they were read; finding lines, JSON,
archives and text in them is left to whoever tokenises it.  A new shape of input is one more subclass of Chunk.
"""

import functools
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megahedge.data.compression import DamagedStream, compression_suffix, open_decompressed

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LINE_SUFFIXES = (".jsonl", ".json", ".ndjson")
TEXT_SUFFIXES = (".txt", "")
NO_ARCHIVE = "no tar archive; plain text ends in .txt, JSON lines in .jsonl, before the suffix of its compression"
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


class Utf8(bytes):
    """A text as a table holds it, which nobody may have decoded yet."""


@dataclass(frozen=True)
class Rows(Chunk):
    """Texts of rows of a table."""

    first: int
    """Number of the first row, from 1."""
    texts: list

    def documents(self, text_key: str) -> Iterator[tuple[str, str | BadRecord]]:
        """See Chunk."""
        for number, text in enumerate(self.texts, self.first):
            decode = _decoded if isinstance(text, Utf8) else functools.partial(checked_text, text_key=text_key)
            yield f"{self.source}:{number}", _attempt(functools.partial(decode, text))


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
    """Files of an archive, or an archive as a whole: each is a text, JSON lines, or an archive of such."""

    members: list[tuple[str, bytes]]
    """Name and content; of an archive as a whole no name."""

    def documents(self, text_key: str) -> Iterator[tuple[str, str | BadRecord]]:
        """See Chunk."""
        for name, content in self.members:
            try:
                for path, inner in _files_within(name, content, _MAX_DEPTH):
                    yield from _documents_of(self._where(path), inner, text_key)
            except DamagedStream as error:
                yield self._where(name), BadRecord("damaged", str(error))

    def _where(self, path: str) -> str:
        return f"{self.source}/{path}" if path else self.source


def _files_within(name: str, content: bytes, depth: int) -> Iterator[tuple[str, bytes]]:
    """Path and bytes of each file in one that may be an archive, compressed or not.  Raises DamagedStream."""
    stream = open_decompressed(name, io.BytesIO(content))
    if not is_archive(stream):
        if not name:
            raise DamagedStream(NO_ARCHIVE)
        yield name, stream.read()
        return
    if depth == 0:
        raise DamagedStream("archives lie too deep in archives")
    for member, inner in archive_members(stream):
        yield from _files_within(f"{name}/{member}" if name else member, inner, depth - 1)


def _documents_of(path: str, content: bytes, text_key: str) -> Iterator[tuple[str, str | BadRecord]]:
    """Documents of a file within an archive, whose kind its name tells; one without a suffix is a text."""
    suffix = suffix_of(path)
    if suffix in LINE_SUFFIXES:
        yield from JsonLines(path, len(content), 0, 1, content.removeprefix(BYTE_ORDER_MARK)).documents(text_key)
    elif suffix in TEXT_SUFFIXES:
        yield path, _attempt(lambda: _decoded(content))
    else:
        yield path, BadRecord("unknown_kind", f"files in archives are texts ({TEXT_SUFFIXES[0]}, or no suffix), JSON lines or archives")


def suffix_of(name: str) -> str:
    """What says of a file's name what it holds: its suffix, that of its compression left out."""
    return Path(name.lower().removesuffix(compression_suffix(name))).suffix


def is_archive(stream: io.BufferedReader) -> bool:
    """Whether a tar archive begins here; nothing is consumed."""
    return stream.peek(512)[257:262] == b"ustar"


class _Member(tarfile.TarInfo):
    """A member whose header must be sound: tarfile takes an archive that is cut off between two members, or damaged, for its end."""

    @classmethod
    def fromtarfile(cls, archive):
        try:
            member = super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # a block of zeros, of which two mark the end; another archive may follow
            archive.ended = True
            raise
        except (tarfile.EmptyHeaderError, tarfile.TruncatedHeaderError):
            if archive.ended:
                raise
            raise DamagedStream("the archive ends without its end mark") from None
        except tarfile.HeaderError as error:
            raise DamagedStream(f"not a sound tar archive ({error})") from None
        archive.ended = False
        return member


class _Archive(tarfile.TarFile):
    """A tar archive that is read through once, and remembers none of its members: there may be millions."""

    tarinfo = _Member
    ended = False


def archive_members(stream: io.BufferedReader) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file in a tar archive, or in several put together; hidden ones are left out.

    Raises DamagedStream where it cannot be read.
    """
    try:
        with _Archive.open(fileobj=stream, mode="r|", ignore_zeros=True) as archive:
            while (member := archive.next()) is not None:
                if member.isfile() and not Path(member.name).name.startswith("."):
                    yield member.name, archive.extractfile(member).read()
                archive.members.clear()
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
        shown = json.dumps(text, default=repr)
        shown = shown if len(shown) <= 40 else f"{shown[:40]} …"
        within = f"; --text_key={text_key}.{next(iter(text))} would look into it" if isinstance(text, dict) and text else ""
        raise BadRecord("not_text", f"{text_key!r} is {shown}, not a text{within}")
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
    """See `nested`.  Raises BadRecord where there is nothing."""
    try:
        return nested(record, text_key)
    except KeyError as error:
        raise BadRecord("missing_key", f"no key {text_key!r}; {error.args[0]} (see --text_key)") from None


def nested(record: dict, text_key: str) -> object:
    """The entry of that name, or the one that its parts between dots lead to.  Raises KeyError, which says what there is instead."""
    if text_key in record:
        return record[text_key]
    value, path = record, text_key.split(".")
    for depth, part in enumerate(path):
        if not isinstance(value, dict) or part not in value:
            within = repr(".".join(path[:depth])) if depth else "this record"
            raise KeyError(f"{within} has {sorted(value)[:10]}" if isinstance(value, dict) else f"{within} is a {type(value).__name__}")
        value = value[part]
    return value
