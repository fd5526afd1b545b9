"""Which sources the words of --input stand for: files, globs, folders, saved `datasets` and names on the Hugging Face hub."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megahedge.data.compression import MAGIC, compression_suffix
from megahedge.data.documents import LINE_SUFFIXES, BadRecord, suffix_of
from megahedge.data.sources import ArchiveFile, DatasetFolder, FileSource, HubDataset, LineFile, ParquetFile, Reading, Source, TextFile
from megahedge.utils.errors import InputError

_DATASETS_MARKERS = ("dataset_info.json", "dataset_dict.json", "state.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
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
