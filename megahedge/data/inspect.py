"""What a dataset holds, whether it is sound, and how it differs from another."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megahedge.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megahedge.data.meta import (
    SENTENCEPIECE,
    SPLITS,
    DatasetMeta,
    check_tokenizer,
    describe,
    eod_density,
    load_meta,
    meta_path,
    tokenizer_digest,
    tokens_per_document,
)
from megahedge.data.tokenizer import SentencePieceTokenizer, load_tokenizer
from megahedge.utils.cli import positional
from megahedge.utils.errors import InputError
from megahedge.utils.files import sha256_file
from megahedge.utils.units import format_bytes

_BLOCK_TOKENS = 1 << 22
_MAX_NAMED = 5


@dataclass(frozen=True)
class InspectConfig:
    """Options of tools/inspect_dataset.py."""

    prefix: str = positional()
    """Prefix of a dataset, or of one pair of files"""
    document: int | None = None
    """Print this document of the pair as text; numbers from 0, those below 0 from the end"""
    tokenizer: str | None = None
    """Folder or hub name for --document; default: the tokenizer that the meta.json names"""
    check: bool = False
    """Read every token: ids within the vocabulary, documents that end as they should"""
    compare: str | None = None
    """Prefix of another dataset; says where the two part"""
    mmap: bool = True
    """Map the files; --no_mmap reads them, for file systems on which mapped files are slow"""


def inspect_dataset(config: InspectConfig) -> tuple[list[str], bool]:
    """Lines of text, and whether all that was looked at is as it should be.

    Raises InputError for files that cannot be read at all or do not fit each other, and for a document that there is not.
    """
    pairs = _pairs(config.prefix, config.mmap)
    meta = load_meta(config.prefix)
    lines, sound = [], True
    for prefix, dataset in pairs.items():
        lines += _header(dataset, meta, prefix)
        if config.check:
            faults = list(_faults(dataset, meta))
            lines += [f"  {fault}" for fault in faults] or [f"  every token was read, and is {_as_it_should_be(dataset, meta)}"]
            sound = sound and not faults
    if config.check and meta is not None and len(pairs) > 0 and meta_path(config.prefix) == Path(f"{config.prefix}.meta.json"):
        missing = [split for split in meta.splits if f"{config.prefix}_{split}" not in pairs]
        lines += [f"{config.prefix}_{split}, of which meta.json tells, is not there" for split in missing]
        sound = sound and not missing
    if config.document is not None:
        lines += _document(config, pairs, meta)
    if config.compare is not None:
        differences = _differences(pairs, _pairs(config.compare, config.mmap))
        lines += differences or [f"{config.prefix} and {config.compare} hold the same tokens in the same documents"]
        sound = sound and not differences
    return lines, sound


def _pairs(prefix: str, mmap: bool) -> dict[str, IndexedDataset]:
    """The pair of that prefix, or those of both splits."""
    if idx_path(prefix).exists() or bin_path(prefix).exists():
        return {prefix: IndexedDataset(prefix, mmap=mmap)}
    found = [f"{prefix}_{split}" for split in SPLITS if idx_path(f"{prefix}_{split}").exists()]
    if not found:
        raise InputError(f"no dataset at {prefix}: neither {idx_path(prefix)} nor {idx_path(f'{prefix}_train')} exists")
    return {name: IndexedDataset(name, mmap=mmap) for name in found}


def _header(dataset: IndexedDataset, meta: DatasetMeta | None, prefix: str) -> list[str]:
    size = bin_path(prefix).stat().st_size + idx_path(prefix).stat().st_size
    lines = [
        f"{prefix}: {dataset.dtype.name}, {dataset.num_documents} documents in {len(dataset)} sequences, {dataset.num_tokens} tokens, "
        f"{format_bytes(size)}, digest {dataset.index_digest[:12]}"
    ]
    split = _split(prefix)
    if meta is None:
        percentiles = ", ".join(f"{name} {value}" for name, value in tokens_per_document(dataset.length_blocks()).items())
        return [*lines, f"  no meta.json; tokens a document: {percentiles or 'none'}"]
    if split in meta.splits:
        lines.append(f"  meta.json: {describe(meta.splits[split])}")
    density = eod_density(dataset, meta.eod_id)
    return [*lines, f"  tokenizer {meta.tokenizer_name}, vocabulary {meta.vocab_size}, EOD {meta.eod_id} ({density})"]


def _faults(dataset: IndexedDataset, meta: DatasetMeta | None) -> Iterator[str]:
    """What is wrong, or not as preprocessing leaves it, in the order of the documents' numbers."""
    empty = np.flatnonzero(dataset.document_lengths(0, dataset.num_documents) == 0)
    if len(empty):
        yield f"{len(empty)} documents are empty: {_named(empty)}"
    if meta is None:
        return
    split = meta.splits.get(_split(dataset.prefix))
    if split is not None and (split.documents, split.tokens) != (dataset.num_documents, dataset.num_tokens):
        yield f"meta.json describes {split.documents} documents and {split.tokens} tokens"
    outside, first_outside, eods, open_ends = 0, None, 0, []
    ends = np.unique(dataset.document_starts[1:]) - 1  # last tokens of documents; of empty ones there are none
    for start, tokens in dataset.blocks(_BLOCK_TOKENS):
        bad = np.flatnonzero((tokens < 0) | (tokens >= meta.vocab_size))
        if len(bad) and first_outside is None:
            first_outside = start + int(bad[0])
        outside, eods = outside + len(bad), eods + int(np.count_nonzero(tokens == meta.eod_id))
        here = ends[np.searchsorted(ends, start) : np.searchsorted(ends, start + len(tokens))]
        open_ends.extend(here[tokens[here - start] != meta.eod_id].tolist())
    if outside:
        place = f"the first at token {first_outside}, of document {_document_of(dataset, first_outside)}"
        yield f"{outside} ids lie outside the vocabulary of {meta.vocab_size}, {place}"
    if split is not None and split.eod_tokens not in (None, eods):
        yield f"{eods} EOD tokens, where meta.json says {split.eod_tokens}"
    if split is not None and split.bin_sha256 not in (None, sha256_file(bin_path(dataset.prefix))):
        yield f"{bin_path(dataset.prefix)} is not the file that was written: its SHA-256 is not that of meta.json"
    if meta.options.get("append_eod", True) and open_ends:
        documents = np.array([_document_of(dataset, end) for end in open_ends[: _MAX_NAMED + 1]])
        yield f"{len(open_ends)} documents do not end in EOD: {_named(documents)}"


def _as_it_should_be(dataset: IndexedDataset, meta: DatasetMeta | None) -> str:
    """How far that goes: by its digest, by its ids, or, where nothing says which there may be, those that there are."""
    if meta is not None:
        split = meta.splits.get(_split(dataset.prefix))
        known = split is not None and split.bin_sha256 is not None
        return "the one that was written" if known else "one of the vocabulary; that it is the one that was written nothing tells"
    if not dataset.num_tokens:
        return "as it should be"
    ranges = [(int(tokens.min()), int(tokens.max())) for _, tokens in dataset.blocks(_BLOCK_TOKENS)]
    return f"a number; ids go from {min(least for least, _ in ranges)} to {max(most for _, most in ranges)}"


def _split(prefix: str) -> str:
    """`train` of `P_train`."""
    return prefix.rsplit("_", 1)[-1]


def _named(numbers: np.ndarray) -> str:
    return ", ".join(map(str, numbers[:_MAX_NAMED].tolist())) + (", …" if len(numbers) > _MAX_NAMED else "")


def _document_of(dataset: IndexedDataset, token: int) -> int:
    return int(np.searchsorted(dataset.document_starts, token, side="right")) - 1


def _document(config: InspectConfig, pairs: dict[str, IndexedDataset], meta: DatasetMeta | None) -> list[str]:
    if len(pairs) > 1:
        raise InputError(f"--document={config.document}: {config.prefix} has several pairs; name one of {' and '.join(pairs)}")
    ((prefix, dataset),) = pairs.items()
    count = dataset.num_documents
    if not -count <= config.document < count:
        raise InputError(f"--document={config.document}: {prefix} has documents 0 to {count - 1}")
    tokens = dataset.document(config.document % count).tolist()
    name = config.tokenizer or (meta and meta.tokenizer_name)
    if name is None:
        raise InputError(f"--document={config.document}: nothing says which tokenizer made {prefix}; give --tokenizer")
    is_model = name.endswith(".model") or (config.tokenizer is None and meta.tokenizer_digest.startswith(SENTENCEPIECE))
    tokenizer = SentencePieceTokenizer(name, "tokenizer") if is_model else load_tokenizer(name, option="tokenizer")
    if config.tokenizer is not None and meta is not None and not is_model:
        check_tokenizer(meta, tokenizer_digest(tokenizer), f"--tokenizer={name}", tokenizer, f"the dataset {prefix}")
    return [f"document {config.document % count}, {len(tokens)} tokens:", tokenizer.decode(tokens)]


def _differences(ours: dict[str, IndexedDataset], theirs: dict[str, IndexedDataset]) -> list[str]:
    """Where datasets part: counts, and the first document that differs."""
    if len(ours) != len(theirs):
        return [f"{' and '.join(ours)} stand against {' and '.join(theirs)}"]
    lines = []
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        for name in ("num_documents", "num_tokens"):
            if getattr(mine, name) != getattr(other, name):
                lines.append(f"{name} is {getattr(mine, name)} in {mine.prefix} and {getattr(other, name)} in {other.prefix}")
        if mine.dtype != other.dtype:
            lines.append(f"{mine.prefix} has {mine.dtype.name} tokens, {other.prefix} {other.dtype.name}; ids are compared all the same")
        number = _first_difference(mine, other)
        if number is not None:
            lines.append(f"document {number} is the first that differs between {mine.prefix} and {other.prefix}")
    return lines


def _first_difference(mine: IndexedDataset, other: IndexedDataset) -> int | None:
    """Number of the first document that is not the same in both; one that only one of them has counts."""
    common = min(mine.num_documents, other.num_documents)
    lengths = (dataset.document_lengths(0, common) for dataset in (mine, other))
    unequal = np.flatnonzero(np.not_equal(*lengths))
    alike = int(unequal[0]) if len(unequal) else common  # documents of equal lengths, whose tokens lie at the same places
    stop = mine.document_start(alike)
    for start in range(0, stop, _BLOCK_TOKENS):
        count = min(_BLOCK_TOKENS, stop - start)
        parted = np.flatnonzero(mine.read(start, count) != other.read(start, count))
        if len(parted):
            return _document_of(mine, start + int(parted[0]))
    return None if alike == mine.num_documents == other.num_documents else alike
