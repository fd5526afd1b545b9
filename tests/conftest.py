"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real inputs named by $MEGAHEDGE_TEST_DATA."""
    folder = os.environ.get("MEGAHEDGE_TEST_DATA")
    if not folder:
        pytest.skip("MEGAHEDGE_TEST_DATA is not set: real text, tokenizer and foreign index files are not at hand")
    return Path(folder)
