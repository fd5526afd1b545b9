"""Many tiny runs in few spawned worlds, because starting one takes seconds."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed import run_distributed


def tiered(*names: str, slow: tuple[str, ...]) -> list:
    """Test parameters, of which those beginning with a word of `slow` belong to the slow tier."""
    return [pytest.param(name, marks=pytest.mark.slow) if name.startswith(slow) else name for name in names]


class Worlds:
    """Makes all runs of a world when the first of them is asked for.

    worlds: number of processes and runs of each, in the order in which they are made, since runs of one may go on from another's.
    make_runs(inputs, runs): makes the runs in a world, on all of its ranks, and returns what the ranks agree on by the run's name.
    """

    def __init__(self, inputs: Path, worlds: list[tuple[int, list]], make_runs: Callable[[Path, list], dict]):
        self._inputs = inputs
        self._worlds = worlds
        self._make_runs = make_runs
        self._made = 0
        self._broken = False
        self.outcomes: dict = {}
        """What `make_runs` has returned, by the run's name."""

    def __call__(self, name: str) -> Path:
        """Folder of the run of that name."""
        number, run = next((number, run) for number, (_, runs) in enumerate(self._worlds) for run in runs if run.name == name)
        while self._made <= number:
            if self._broken:
                pytest.fail("an earlier test has failed to make the runs of this world")
            self._broken = True
            self._make(*self._worlds[self._made])
            self._broken = False
            self._made += 1
        return self._inputs / run.changes.get("run", run.name)

    def _make(self, world_size: int, runs: list) -> None:
        outcomes, *others = run_distributed(self._make_runs, world_size, self._inputs, runs, timeout_seconds=1200)
        assert all(other == outcomes for other in others)
        self.outcomes |= outcomes
