"""Ranks that have fallen silent: stopped, swapped out, or on a machine that is gone without a word.

A rank that dies closes its connections, and the others know at once.  One that merely stops leaves them waiting in a collective, for as
long as that may take.  So each rank has a thread that gives a sign of life every few seconds through the job's store, and rank 0 one that
looks for them and says who is missing.  It ends nobody: what is silent may come back.  Rank 0 itself is watched by nobody: the store,
by which signs are given, is its own.
"""

import threading
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megahedge.utils.logging import get_logger
from megahedge.utils.words import ranks_have

SECONDS_BETWEEN_SIGNS = 10.0
SECONDS_OF_SILENCE = 60.0
_SIGN = "megahedge/alive/"
_SECONDS_TO_END = 5.0

logger = get_logger(__name__)


class SilenceWatch:
    """Within `with`, signs of life are given, and on rank 0 looked for; does nothing for a rank alone."""

    def __init__(self, interval: float = SECONDS_BETWEEN_SIGNS, silence: float = SECONDS_OF_SILENCE):
        self._interval, self._silence = interval, silence
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "SilenceWatch":
        if dist.get_world_size() > 1:
            self._thread = threading.Thread(target=self._run, args=(_get_default_store().clone(),), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        if self._thread is not None:  # a thread within a call of the store must not see the interpreter end
            self._thread.join(_SECONDS_TO_END)

    def _run(self, store: dist.Store) -> None:
        """Its own connection to the store, which a collective of the main thread may be waiting at."""
        others = _Others(range(1, dist.get_world_size()), self._silence) if dist.get_rank() == 0 else None
        count = 0
        try:
            while not self._done.is_set():
                count += 1
                store.set(f"{_SIGN}{dist.get_rank()}", str(count))
                if others is not None:
                    others.look(lambda rank: store.get(f"{_SIGN}{rank}") if store.check([f"{_SIGN}{rank}"]) else None)
                self._done.wait(self._interval)
        except RuntimeError:
            # the store went with rank 0, and the main thread's collective tells of that
            return


class _Others:
    """What was last heard of each rank."""

    def __init__(self, ranks: range, silence: float):
        self._silence = silence
        self._heard = dict.fromkeys(ranks, (None, time.monotonic()))
        self._silent: set[int] = set()

    def look(self, read: Callable[[int], bytes | None]) -> None:
        """Ask for every rank's latest sign, and tell of those that have fallen silent or are back."""
        now = time.monotonic()
        for rank, (sign, _) in self._heard.items():
            latest = read(rank)
            if latest is not None and latest != sign:
                self._heard[rank] = latest, now
        silent = {rank for rank, (_, when) in self._heard.items() if now - when >= self._silence}
        if silent - self._silent:
            longest = max(now - self._heard[rank][1] for rank in silent)
            text = "%s not been heard of for %.0f s, and the others wait: stopped, swapping, or on a machine that is gone?"
            logger.warning(text, ranks_have(sorted(silent)), longest)
        if self._silent - silent:
            logger.warning("%s been heard of again", ranks_have(sorted(self._silent - silent)))
        self._silent = silent
