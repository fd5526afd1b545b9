"""How far preprocessing has got: a bar on a terminal, lines elsewhere, with rates and the time that is left."""

import itertools
import sys
import time
from pathlib import Path

import tqdm

from megahedge.data.documents import Chunk
from megahedge.data.encoding import Encoded
from megahedge.data.sources import Source
from megahedge.utils.logging import get_logger
from megahedge.utils.units import format_count, format_seconds

_SECONDS_BETWEEN_LINES = 10

logger = get_logger(__name__)


class PreprocessProgress:
    """Counts what this process has done.

    The time that is left follows from the bytes of the sources on the disk, where all of them are known.
    """

    def __init__(self, sources: list[Source], first_source: int):
        self._places = {source.name: place for place, source in enumerate(sources)}
        sizes = [source.size for source in sources]
        self._known = None not in sizes and sum(sizes) > 0
        self._ends = list(itertools.accumulate(sizes)) if self._known else []
        self._sizes = sizes
        self._begin = sum(sizes[:first_source]) if self._known else 0
        self._documents = self._tokens = self._bytes = 0
        self._started = self._last_line = time.monotonic()
        self._bar = tqdm.tqdm(unit="doc", unit_scale=True, dynamic_ncols=True) if sys.stderr.isatty() else None

    def __enter__(self) -> "PreprocessProgress":
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, chunk: Chunk, result: Encoded) -> None:
        """Count one chunk and show it."""
        self._documents += result.num_documents
        self._tokens += result.num_tokens
        self._bytes += chunk.num_bytes
        now = time.monotonic()
        if self._bar is None and now - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        seconds = max(now - self._started, 1e-9)
        rates = f"{format_count(self._tokens / seconds)} tokens/s, {self._bytes / seconds / 1e6:.1f} MB/s"
        place = self._places[chunk.source]
        where = f"{Path(chunk.source).name} ({place + 1} of {len(self._places)})" + self._left(chunk, place, seconds)
        if self._bar is not None:
            self._bar.set_postfix_str(f"{rates}, {where}", refresh=False)
            self._bar.update(result.num_documents)
        else:
            counts = f"{self._documents} documents, {format_count(self._tokens)} tokens"
            logger.info("%s: %s; %.0f documents/s, %s", where, counts, self._documents / seconds, rates)

    def describe(self) -> str:
        """How long this process took, and its rates."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        rates = f"{self._documents / seconds:.0f} documents/s, {format_count(self._tokens / seconds)} tokens/s"
        return f"{format_seconds(seconds)} ({rates})"

    def _left(self, chunk: Chunk, place: int, seconds: float) -> str:
        if not self._known:
            return ""
        done, total = self._ends[place] - self._sizes[place] + chunk.position, self._ends[-1]
        left = seconds * (total - done) / max(1, done - self._begin)
        return f", {done / total:.0%}, {format_seconds(left)} left"
