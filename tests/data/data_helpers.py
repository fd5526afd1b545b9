"""Small corpora for the data tests."""

import contextlib
import json
import resource

import numpy as np

from megahedge.data.indexed_dataset import IndexedDataset
from megahedge.data.indexed_writer import IndexedDatasetWriter

EOD = 0


def write_pair(prefix, documents, dtype=np.uint16) -> IndexedDataset:
    """Write documents, lists of ids, as a pair and open it."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
        writer.finish()
    return IndexedDataset(prefix)


def numbered_documents(lengths) -> list[np.ndarray]:
    """Documents in which no token occurs twice, so that a token tells where it comes from."""
    return np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])


def random_lengths(count, low, high, seed=0) -> list[int]:
    """Document lengths from low to high."""
    return np.random.default_rng(seed).integers(low, high + 1, count).tolist()


def write_jsonl(path, texts, key="text"):
    """One JSON object a line."""
    path.write_bytes(b"".join(json.dumps({key: text}).encode() + b"\n" for text in texts))
    return path


@contextlib.contextmanager
def full_disk(limit_bytes=4096):
    """Inside, no file can grow beyond the limit: a write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
