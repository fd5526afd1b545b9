"""Lists in messages, log lines once per job, text that no locale changes, and the versions that a run records."""

import logging
import os
import subprocess
import sys

import pytest

from megahedge.utils.files import atomic_write, read_json
from megahedge.utils.logging import log_agreed
from megahedge.utils.versions import PACKAGES, code_version, package_versions
from megahedge.utils.words import divisors, either


def run_python(code: str, *arguments, **environment) -> subprocess.CompletedProcess:
    """A fresh interpreter with these variables, and no launcher's."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=60, check=True)


def test_lists_read_as_sentences():
    assert [either(values) for values in ([1], [1, 2], (1, 2, 4), ["bf16", "fp32"])] == ["1", "1 or 2", "1, 2 or 4", "bf16 or fp32"]
    assert either(divisors(16)) == "1, 2, 4, 8 or 16"


def test_divisors_rise_and_stop_at_the_most_that_a_message_holds():
    assert divisors(1) == [1]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(5040, most=4) == [1, 2, 3, 4]
    assert len(divisors(5040)) == 12


WRITE_TEXT = """
import locale, sys
from megahedge.utils.files import atomic_write, read_json, write_json
assert locale.getencoding().lower() not in ("utf-8", "utf8"), locale.getencoding()
with atomic_write(sys.argv[1], "w") as handle:
    handle.write("\\u0120the")
write_json(sys.argv[2], {"\\u0120": "\\u00e9"})
assert read_json(sys.argv[2]) == read_json(sys.argv[3]) == {"\\u0120": "\\u00e9"}
"""


def test_text_is_utf8_whatever_the_locale(tmp_path):
    (tmp_path / "raw.json").write_text('{"Ġ": "é"}', encoding="utf-8")
    run_python(WRITE_TEXT, tmp_path / "text", tmp_path / "value.json", tmp_path / "raw.json", LC_ALL="C", PYTHONUTF8="0")
    assert (tmp_path / "text").read_bytes() == "Ġthe".encode()
    assert read_json(tmp_path / "value.json") == {"Ġ": "é"}


def test_two_writers_do_not_meet(tmp_path):
    """Nor do two of one pid on two nodes: the names are random."""
    path = tmp_path / "file"
    with atomic_write(path, "w") as first, atomic_write(path, "w") as second:
        assert first.name != second.name
        first.write("first")
        second.write("second")
    assert path.read_text() == "first"  # its block ended last
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


LOG = """
import logging
from megahedge.utils.logging import get_logger, log_agreed
logger = get_logger("test")
log_agreed(logger, logging.WARNING, "agreed %d of %d", 1, 2)
logger.info("heard")
logger.warning("own")
"""


@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        ({}, ["WARNING agreed 1 of 2", "INFO heard", "WARNING own"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["[rank 0] WARNING agreed 1 of 2", "[rank 0] INFO heard", "[rank 0] WARNING own"]),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["[rank 1] WARNING own"]),
        # what is no number must not keep a log from saying so
        ({"RANK": "²", "WORLD_SIZE": " "}, ["WARNING agreed 1 of 2", "INFO heard", "WARNING own"]),
        ({"RANK": "x", "WORLD_SIZE": "2"}, ["[rank 0] WARNING agreed 1 of 2", "[rank 0] INFO heard", "[rank 0] WARNING own"]),
    ],
)
def test_what_all_ranks_know_is_logged_once_and_what_one_knows_by_it(environment, lines):
    stderr = run_python(LOG, **environment).stderr
    assert [line.split(" ", 1)[1] for line in stderr.splitlines()] == lines  # a clock stands before each


def test_an_agreed_event_is_logged_by_the_first_rank_only(monkeypatch):
    messages = []
    logger = logging.Logger("alone")
    monkeypatch.setattr(logger, "log", lambda level, text, *values: messages.append((level, text % values)))
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("RANK", rank)
        log_agreed(logger, logging.ERROR, "step %d", int(rank))
    assert messages == [(logging.ERROR, "step 0")]


def test_versions_name_the_code_and_every_package():
    versions = package_versions()
    assert tuple(versions) == PACKAGES
    assert versions["torch"] and versions["deepspeed"]
    code = code_version()
    assert code["version"]
    assert code["git_commit"] is None or len(code["git_commit"].removesuffix("-dirty")) == 40
