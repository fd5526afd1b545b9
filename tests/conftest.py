"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest

SHARED_WORLDS = ("training", "stages")
"""Folders whose tests look at the same runs, so that one worker has to make them all."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With several workers, keep the tests of a file together, and those of a folder that shares its runs."""
    from xdist.scheduler import LoadScopeScheduling

    class ByWorld(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = Path(nodeid.split("::", 1)[0])
            return path.parent.name if path.parent.name in SHARED_WORLDS else str(path)

    return ByWorld(config, log)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real inputs named by $MEGAHEDGE_TEST_DATA."""
    folder = os.environ.get("MEGAHEDGE_TEST_DATA")
    if not folder:
        pytest.skip("MEGAHEDGE_TEST_DATA is not set: real text, tokenizer and foreign index files are not at hand")
    return Path(folder)
