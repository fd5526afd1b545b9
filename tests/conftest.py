"""Fixtures shared by all tests."""

import collections
import os
from pathlib import Path

import pytest

SHARED_WORLDS = ("training", "stages")
"""Folders whose tests look at the same runs, so that one worker has to make them all."""
LONG = ("stages", "tests/topologies/test_matrix.py", "training", "tests/slurm/test_cluster.py", "tests/test_quickstart.py")
LONG += ("tests/kernels/test_triton.py", "tests/data/test_restart.py")
"""Scopes that take minutes: they begin first, so that no worker is left with one when the other has done."""


def _scope(nodeid: str) -> str:
    """Of a test: what a worker makes as a whole."""
    path = Path(nodeid.split("::", 1)[0])
    return path.parent.name if path.parent.name in SHARED_WORLDS else str(path)


def pytest_collection_modifyitems(config, items):
    """In the workers of pytest-xdist, long scopes first, then those of most tests."""
    if not hasattr(config, "workerinput"):
        return
    sizes = collections.Counter(_scope(item.nodeid) for item in items)
    places = {scope: place for place, scope in enumerate(LONG)}
    items.sort(key=lambda item: (places.get(scope := _scope(item.nodeid), len(LONG)), -sizes[scope], scope))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With several workers, keep the tests of a file together, and those of a folder that shares its runs."""
    from xdist.scheduler import LoadScopeScheduling

    class ByWorld(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _scope(nodeid)

    config.option.loadscopereorder = False  # they are in the order of pytest_collection_modifyitems
    return ByWorld(config, log)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real inputs named by $MEGAHEDGE_TEST_DATA."""
    folder = os.environ.get("MEGAHEDGE_TEST_DATA")
    if not folder:
        pytest.skip("MEGAHEDGE_TEST_DATA is not set: real text, tokenizer and foreign index files are not at hand")
    return Path(folder)
