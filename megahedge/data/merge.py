"""Several datasets made one, document after document: what one preprocessing of all their text would have written."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megahedge.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megahedge.data.indexed_writer import PairFiles, publish_pair, write_index, written_digest
from megahedge.data.meta import (
    COUNTS,
    FORMAT_VERSION,
    SPLITS,
    DatasetMeta,
    SplitMeta,
    check_output_prefix,
    check_tokenizer,
    load_meta,
    meta_path,
    publish_dataset,
    tokens_per_document,
    unfinished_path,
    writing_dataset,
)
from megahedge.utils.errors import InputError
from megahedge.utils.files import check_output, disk_errors_explained
from megahedge.utils.logging import get_logger

_BLOCK_TOKENS = 1 << 22
_MUST_AGREE = ("val_fraction", "seed", "append_eod")

logger = get_logger(__name__)


@dataclass(frozen=True)
class MergeConfig:
    """Options of tools/merge_datasets.py."""

    input: tuple[str, ...]
    """Prefixes of the datasets, in the order in which their documents are to stand"""
    output_prefix: str
    """Where the merged dataset goes"""
    overwrite: bool = False
    """Replace an existing dataset at this prefix"""

    def __post_init__(self):
        if len(self.input) < 2:
            raise InputError(f"--input={' '.join(self.input)}: name at least two datasets")
        check_output_prefix(self.output_prefix)


def merge_datasets(config: MergeConfig) -> None:
    """Write the datasets of `config.input` as one: train pairs, validation pairs and meta.json, or plain pairs without a meta.json.

    Sequences and documents stay as they are; the token dtype is the smallest that holds all of theirs.
    Raises InputError for datasets that do not fit together, RunError for a full disk; then no output appears.
    """
    with writing_dataset(config.output_prefix):
        _merge(config)


def _merge(config: MergeConfig) -> None:
    for prefix in config.input:
        if not any(idx_path(f"{prefix}{split}").exists() for split in ("", *(f"_{split}" for split in SPLITS))):
            raise InputError(f"--input={prefix}: there is no dataset, neither {idx_path(prefix)} nor {idx_path(f'{prefix}_train')} exists")
    metas = [load_meta(prefix) if meta_path(prefix) == _own_meta(prefix) else None for prefix in config.input]
    if None in metas and any(metas):
        bare = config.input[metas.index(None)]
        raise InputError(f"--input={bare} is one pair without a meta.json, others have one: merge datasets of one kind")
    splits = [""] if metas[0] is None else [f"_{split}" for split in SPLITS]
    outputs = [f"{config.output_prefix}{split}" for split in splits]
    _check_output(config, outputs, bare=metas[0] is None)
    parts = [[IndexedDataset(f"{prefix}{split}") for prefix in config.input] for split in splits]
    _check_tokens(config, parts)
    meta = None if metas[0] is None else _merged_meta(config.input, metas, parts)
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(PairFiles(output)) for output in outputs]
        for pair, datasets in zip(pairs, parts, strict=True):
            with disk_errors_explained(pair.prefix):
                _write_pair(pair, datasets)
        if meta is None:
            with disk_errors_explained(outputs[0]):
                publish_pair(outputs[0])
        else:
            publish_dataset(config.output_prefix, _with_digests(meta, outputs))
    for output, datasets in zip(outputs, parts, strict=True):
        documents, tokens = (sum(getattr(dataset, name) for dataset in datasets) for name in ("num_documents", "num_tokens"))
        logger.info("%s: %d documents, %d tokens of %d datasets", output, documents, tokens, len(datasets))


def _check_output(config: MergeConfig, outputs: list[str], *, bare: bool) -> None:
    prefix = config.output_prefix
    if any(Path(name).absolute() == Path(prefix).absolute() for name in config.input):
        raise InputError(f"--output_prefix={prefix} is one of the inputs, and would be read while it is replaced; choose another")
    if unfinished_path(prefix).exists():
        raise InputError(f"--output_prefix={prefix}: {unfinished_path(prefix)} tells of an unfinished preprocessing; choose another")
    if bare and meta_path(prefix).exists():
        raise InputError(f"--output_prefix={prefix}: {meta_path(prefix)} describes other data, and would go on doing so; choose another")
    paths = [path(output) for output in outputs for path in (bin_path, idx_path)]
    check_output("output_prefix", prefix, *paths, *([] if bare else [meta_path(prefix)]), overwrite=config.overwrite)


def _own_meta(prefix: str) -> Path:
    """Where the meta.json of a dataset lies that has both splits; that of one of its pairs is not its own."""
    return Path(f"{prefix}.meta.json")


def _check_tokens(config: MergeConfig, parts: list[list[IndexedDataset]]) -> None:
    """Token ids of one tokenizer, as far as anything says so."""
    for dataset in (dataset for datasets in parts for dataset in datasets):
        if dataset.dtype.kind == "f":
            raise InputError(f"{dataset.prefix}.bin holds {dataset.dtype} numbers, not token ids")
    known = [(prefix, meta) for prefix in config.input if (meta := load_meta(prefix)) is not None]
    for _, meta in known[1:]:
        check_tokenizer(meta, known[0][1].tokenizer_digest, known[0][0])


def _merged_meta(prefixes: tuple[str, ...], metas: list[DatasetMeta], parts: list[list[IndexedDataset]]) -> DatasetMeta:
    first = metas[0]
    for prefix, meta in zip(prefixes, metas, strict=True):
        if set(meta.splits) != set(SPLITS):
            raise InputError(f"{meta_path(prefix)} tells of {sorted(meta.splits)} and not of {sorted(SPLITS)}; preprocess the data again")
    for prefix, meta in zip(prefixes, metas, strict=True):
        for name in _MUST_AGREE:
            if meta.options.get(name) != first.options.get(name):
                pair = f"{first.options.get(name)} for {prefixes[0]}, {meta.options.get(name)} for {prefix}"
                raise InputError(f"--{name} was {pair}: train and validation would not be kept apart alike; preprocess one of them again")
    splits = {}
    for split, datasets in zip(SPLITS, parts, strict=True):
        counts = [meta.splits[split] for meta in metas]
        sums = {name: _sum([getattr(count, name) for count in counts]) for name in COUNTS}
        lengths = itertools.chain.from_iterable(dataset.length_blocks() for dataset in datasets)
        splits[split] = SplitMeta(**sums, tokens_per_document=tokens_per_document(lengths))
    reasons = sorted({reason for meta in metas for reason in meta.skipped})
    return dataclasses.replace(
        first,
        format_version=FORMAT_VERSION,
        splits=splits,
        skipped={reason: sum(meta.skipped.get(reason, 0) for meta in metas) for reason in reasons},
        source=[source for meta in metas for source in meta.source],
    )


def _sum(counts: list[int | None]) -> int | None:
    return None if None in counts else sum(counts)


def _write_pair(pair: PairFiles, datasets: list[IndexedDataset]) -> None:
    dtype = np.result_type(*(dataset.dtype for dataset in datasets))
    with pair.open_bin() as handle:
        for dataset in datasets:
            for _, tokens in dataset.blocks(_BLOCK_TOKENS):
                handle.write(np.ascontiguousarray(tokens, dtype).data)
    num_sequences, num_documents = sum(map(len, datasets)), sum(dataset.num_documents for dataset in datasets)

    def sizes() -> Iterator[np.ndarray]:
        for dataset in datasets:
            yield from (dataset.sizes[start : start + _BLOCK_TOKENS] for start in range(0, len(dataset), _BLOCK_TOKENS))

    def offsets() -> Iterator[np.ndarray]:
        before = 0
        for dataset in datasets:
            yield from (
                dataset.document_offsets[start : min(start + _BLOCK_TOKENS, dataset.num_documents)] + before
                for start in range(0, dataset.num_documents, _BLOCK_TOKENS)
            )
            before += len(dataset)
        yield np.array([before])

    with pair.open_idx() as handle:
        write_index(handle, dtype, num_sequences, sizes, num_documents + 1, offsets())


def _with_digests(meta: DatasetMeta, outputs: list[str]) -> DatasetMeta:
    """The meta with the digests of token files that are ready to be published."""
    splits = {
        name: dataclasses.replace(meta.splits[name], bin_sha256=written_digest(output))
        for name, output in zip(SPLITS, outputs, strict=True)
    }
    return dataclasses.replace(meta, splits=splits)
