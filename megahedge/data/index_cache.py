"""What is derived from a dataset and takes a while, kept beside it under a key of its content."""

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megahedge.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megahedge.utils.errors import InputError, RunError
from megahedge.utils.files import atomic_write, file_lock, remove_temporary_files
from megahedge.utils.logging import get_logger, log_once
from megahedge.utils.units import format_count

_FORMAT = 2  # of the sample order and of the files; a change makes old ones miss
_MIN_CACHED_ENTRIES = 1 << 17  # smaller arrays are rebuilt in milliseconds; a tiny corpus has thousands of epochs
_BLOCK_TOKENS = 1 << 22
_INT64 = np.dtype(np.int64)

logger = get_logger(__name__)


def check_ids(dataset: IndexedDataset, vocab_size: int, cache: "ArrayCache") -> None:
    """Raise InputError where a token of the pair lies outside the vocabulary.

    For pairs that no meta.json vouches for.  Every token is read, once for each content.
    """
    least, most = cache.get("range of ids", 2, lambda: _range_of_ids(dataset), costly=True).tolist()
    if least < 0 or most >= vocab_size:
        wrong = least if least < 0 else most
        raise InputError(f"{dataset.prefix} holds the token id {wrong}, outside the vocabulary of {vocab_size}: another tokenizer made it")


def _range_of_ids(dataset: IndexedDataset) -> np.ndarray:
    """int64 [2]: the least and the largest id."""
    if dataset.num_tokens > 100 * _BLOCK_TOKENS:
        logger.info("reading the %s tokens of %s once, for their largest id", format_count(dataset.num_tokens), dataset.prefix)
    ranges = [(int(tokens.min()), int(tokens.max())) for _, tokens in dataset.blocks(_BLOCK_TOKENS)]
    ranges = np.array(ranges or [(0, 0)], np.int64)
    return np.array([ranges[:, 0].min(), ranges[:, 1].max()], np.int64)


class ArrayCache:
    """Arrays derived from one dataset, kept as .npy files under a key of the dataset's content."""

    def __init__(self, dataset: IndexedDataset, folder: str | os.PathLike | None, *, mmap: bool = True):
        self._dataset = dataset
        self._folder = Path(folder) if folder else Path(dataset.prefix).parent / ".index_cache"
        self._mmap = mmap

    def get(self, name: str, length: int, build: Callable[[], np.ndarray], *, dtype: np.dtype = _INT64, costly: bool = False) -> np.ndarray:
        """The array `name` of `length` entries: read from its file, or built, and stored if it is large or said to be costly."""
        if length < _MIN_CACHED_ENTRIES and not costly:
            return build().astype(dtype, copy=False)
        path = self._folder / f"{self._key(name)}.npy"
        built = None
        try:
            array = self._load(path, length, dtype)
            if array is not None:
                return array
            with file_lock(self._folder / "lock"):
                array = self._load(path, length, dtype)  # another process may have built it while this one waited
                if array is None:
                    with _not_of_the_cache():
                        built = build().astype(dtype, copy=False)
                    remove_temporary_files(self._folder, path.name)
                    with atomic_write(path) as handle:
                        np.save(handle, built)
                    array = self._load(path, length, dtype)
                # a file system without working locks may let another writer in between
                return built if array is None else array
        except OSError as error:
            log_once(logger, logging.INFO, f"cannot use {self._folder} ({error.strerror}); every process builds its own")
            return build().astype(dtype, copy=False) if built is None else built

    def _load(self, path: Path, length: int, dtype: np.dtype) -> np.ndarray | None:
        if not path.is_file():
            return None
        try:
            array = np.load(path, mmap_mode="r" if self._mmap else None)
        except (ValueError, EOFError):
            logger.warning("%s is damaged and is built again", path)
            return None
        return np.asarray(array) if array.shape == (length,) and array.dtype == dtype else None

    def _key(self, name: str) -> str:
        return hashlib.sha256(f"{_FORMAT} {self._content} {name}".encode()).hexdigest()[:32]

    @functools.cached_property
    def _content(self) -> str:
        stats = [path.stat() for path in (bin_path(self._dataset.prefix), idx_path(self._dataset.prefix))]
        return " ".join([self._dataset.index_fingerprint, *(f"{stat.st_size} {stat.st_mtime_ns}" for stat in stats)])


@contextlib.contextmanager
def _not_of_the_cache() -> Iterator[None]:
    """A disk that fails while the data is read says nothing of the folder of the cache."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot read {error.filename or 'the data'}: {error.strerror}") from None
