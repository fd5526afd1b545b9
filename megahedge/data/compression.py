"""Compressed files as streams of what they hold, recognised by their first bytes."""

import bz2
import functools
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable

# The first bytes by suffix; bzip2's begin like a word, so that its block's are looked at as well.
MAGIC = {
    ".gz": re.compile(rb"\x1f\x8b\x08"),
    ".bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)"),
    ".xz": re.compile(rb"\xfd7zXZ\x00"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd"),
}
_HEAD_BYTES = 16
_BUFFER_BYTES = 1 << 20


class DamagedStream(ValueError):  # noqa: N818 (a state of the file; who knows its name makes it an error)
    """A compressed stream that is damaged, cut off, or not what its name says."""


def compression_suffix(name: str) -> str:
    """The suffix of `name` that says how it is compressed, or nothing."""
    return next((suffix for suffix in MAGIC if name.lower().endswith(suffix)), "")


def open_decompressed(name: str, raw: io.RawIOBase) -> io.BufferedReader:
    """What the file `name` holds, whose bytes `raw` gives; as it is where it is not compressed.

    Reading raises DamagedStream where the compressed data is damaged or ends too early.
    Raises DamagedStream for a file that is not compressed as its name says.
    """
    buffered = io.BufferedReader(raw, _BUFFER_BYTES)
    head = buffered.peek(_HEAD_BYTES)
    found = next((suffix for suffix, magic in MAGIC.items() if magic.match(head)), "")
    named = compression_suffix(name)
    if named and head and not found:
        raise DamagedStream(f"it is named {named} but is not compressed so")
    return io.BufferedReader(_Decompressed(_open(found, buffered)), _BUFFER_BYTES) if found else buffered


def _open(suffix: str, stream: io.BufferedReader):
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=stream)
    if suffix == ".bz2":
        return _Streams(stream, bz2.BZ2Decompressor)
    if suffix == ".xz":
        return _Streams(stream, functools.partial(lzma.LZMADecompressor, lzma.FORMAT_XZ))
    import pyarrow  # the standard library of Python 3.11 knows no zstd, and `datasets` brings this

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), "zstd")


class _Streams:
    """Compressed streams that follow one another in a file, with zeros between and after them, and nothing else.

    The library's own classes take what is no stream for rubbish that may be left out, the rest of the file with it.
    """

    def __init__(self, stream: io.BufferedReader, new: Callable):
        self._stream, self._new = stream, new
        self._decompressor = new()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end."""
        while True:
            if self._decompressor.eof:
                rest = self._decompressor.unused_data.lstrip(b"\0")
                while not rest and (block := self._stream.read(_BUFFER_BYTES)):
                    rest = block.lstrip(b"\0")
                if not rest:
                    return b""
                self._decompressor = self._new()
                block = rest
            else:
                block = self._stream.read1(_BUFFER_BYTES) if self._decompressor.needs_input else b""
                if self._decompressor.needs_input and not block:
                    raise EOFError("it ends within a compressed stream")
            if data := self._decompressor.decompress(block, size):
                return data


class _Decompressed(io.RawIOBase):
    """Reads a decompressor, whose library has errors of its own."""

    def __init__(self, stream):
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            if error.errno is not None:  # the file's, not the decompressor's
                raise
            raise DamagedStream(str(error)) from None
        except (EOFError, zlib.error, lzma.LZMAError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
            raise DamagedStream(str(error)) from None
        buffer[: len(data)] = data
        return len(data)
