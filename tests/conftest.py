"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest

SHARED_WORLDS = ("training", "stages")
"""Folders whose tests look at the same runs, so that one worker has to make them all."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """With several workers, keep the tests of a file together, and those of a folder that shares its runs."""
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder in SHARED_WORLDS else str(item.path)))


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real inputs named by $MEGAHEDGE_TEST_DATA."""
    folder = os.environ.get("MEGAHEDGE_TEST_DATA")
    if not folder:
        pytest.skip("MEGAHEDGE_TEST_DATA is not set: real text, tokenizer and foreign index files are not at hand")
    return Path(folder)
