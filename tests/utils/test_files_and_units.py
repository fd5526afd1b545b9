"""Atomic files, digests, locks, and numbers as people write them."""

import hashlib
import math
import multiprocessing
import os
import threading
import time

import pytest

from megahedge.utils.errors import InputError
from megahedge.utils.files import (
    apply_umask,
    atomic_write,
    check_output,
    file_lock,
    finite_or_none,
    is_temporary_file,
    read_json,
    read_json_object,
    remove_temporary_files,
    sha256_file,
    write_json,
)
from megahedge.utils.units import format_bytes, format_count, format_seconds, parse_count


def test_an_atomic_write_is_whole_or_absent(tmp_path):
    path = tmp_path / "deep" / "file"
    with atomic_write(path, "w") as handle:
        handle.write("first")
        assert not path.exists()
    with pytest.raises(RuntimeError), atomic_write(path, "w") as handle:
        handle.write("second")
        raise RuntimeError
    assert path.read_text() == "first"
    assert os.listdir(path.parent) == ["file"]


def _die_in_a_write(path):
    with atomic_write(path, "w") as handle:
        handle.write("second")
        handle.flush()
        os._exit(1)


def test_a_killed_write_leaves_the_old_file_and_a_leftover_that_is_known(tmp_path):
    path = tmp_path / "file"
    path.write_text("first")
    process = multiprocessing.get_context("fork").Process(target=_die_in_a_write, args=(path,))
    process.start()
    process.join()
    assert path.read_text() == "first"
    (leftover,) = (entry for entry in tmp_path.iterdir() if entry != path)
    assert is_temporary_file(leftover) and not is_temporary_file(path)
    remove_temporary_files(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_json_goes_there_and_back(tmp_path):
    value = {"b": [1, None, "é"], "a": 0.1}
    write_json(tmp_path / "v.json", value)
    assert read_json(tmp_path / "v.json") == read_json_object(tmp_path / "v.json") == value
    assert list(read_json(tmp_path / "v.json")) == ["b", "a"]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_json_does_not_know_is_not_written(tmp_path, value):
    """json.loads of Python reads `Infinity`; jq, JavaScript and pandas do not."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "v.json", {"a": [value]})
    assert list(tmp_path.iterdir()) == []
    assert finite_or_none({"a": [value, 1.5, 2], "b": {"c": (value, "x", None)}}) == {"a": [None, 1.5, 2], "b": {"c": [None, "x", None]}}


@pytest.mark.parametrize(("name", "reason"), [("none.json", "No such file"), ("", "Is a directory"), ("v.json/x", "Not a directory")])
def test_a_json_object_that_cannot_be_read_is_the_users_error(name, reason, tmp_path):
    (tmp_path / "v.json").write_text("{}")
    with pytest.raises(InputError, match=f"cannot be read: {reason}") as caught:
        read_json_object(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("content", [b'{"a": ', b"[1]", b"\xff", b"", b"9" * 5000, b"[" * 100_000])
def test_a_damaged_json_object_is_the_users_error(content, tmp_path):
    (tmp_path / "v.json").write_bytes(content)
    with pytest.raises(InputError, match=r"v\.json is damaged"):
        read_json_object(tmp_path / "v.json")


def test_digest_is_sha256(tmp_path):
    (tmp_path / "f").write_bytes(b"abc" * 100000)
    assert sha256_file(tmp_path / "f") == hashlib.sha256(b"abc" * 100000).hexdigest()


def test_a_lock_is_exclusive_and_freed(tmp_path):
    with file_lock(tmp_path / "lock"), pytest.raises(BlockingIOError), file_lock(tmp_path / "lock", blocking=False):
        pass
    with file_lock(tmp_path / "lock", blocking=False):
        pass


def test_a_lock_that_is_removed_excludes_whoever_had_opened_it_before(tmp_path):
    path = tmp_path / "lock"
    held, release = threading.Event(), threading.Event()

    def hold():
        with file_lock(path, remove=True):
            held.set()
            release.wait(60)

    waiting = threading.Thread(target=hold)
    with file_lock(path, remove=True):
        waiting.start()
        while sum(os.path.realpath(f"/proc/self/fd/{name}") == str(path) for name in os.listdir("/proc/self/fd")) < 2:
            time.sleep(0.01)
    assert held.wait(60)
    with pytest.raises(BlockingIOError), file_lock(path, blocking=False):
        pass
    release.set()
    waiting.join()
    assert not path.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "is empty"),
        (" ", "is empty"),
        ("{folder}", "is a folder"),
        ("{folder}/file/x/y", "file is not a folder"),
        ("{folder}/dangling/x", "dangling is not a folder"),
        ("{folder}/" + "n" * 250, "File name too long"),
        ("{folder}/new/" + "n" * 256 + "/x", "File name too long"),
        ("{folder}" + "/new" * 2000, "File name too long"),
        ("/proc/x", "no such file can be made in /proc"),
        ("/dev/full", "is no ordinary file"),
        ("{folder}/file", "exists already; choose another --output, or give --overwrite"),
    ],
)
def test_an_output_that_cannot_be_written_is_found_without_writing(tmp_path, value, message):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "dangling").symlink_to("nowhere")
    value = value.format(folder=tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        check_output("output", value, value, overwrite=False)
    assert "--output" in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file"] and (tmp_path / "file").read_text() == "kept"


def test_an_output_that_can_be_written_is_not_written_yet(tmp_path):
    (tmp_path / "file").write_text("kept")
    check_output("output", "x", tmp_path / "new" / "folder" / "x", overwrite=False)
    check_output("output", "x", tmp_path / "file", overwrite=True)
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("text", "count"),
    [("1e9", 10**9), ("1B", 10**9), ("1b", 10**9), ("300M", 3 * 10**8), ("2.5k", 2500), ("1T", 10**12), (" 12 ", 12), (7, 7), (1e6, 10**6)],
)
def test_counts(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "1.5", "abc", "1X", "nan", "inf", "1e999", "1 000", float("nan"), 0.5])
def test_what_is_no_count(text):
    with pytest.raises(InputError, match=r"write it like 300M"):
        parse_count(text)


def test_numbers_for_people():
    assert [format_count(value) for value in (0, 999, 1000, 1_014_000_000, 2.5e12)] == ["0", "999", "1K", "1.01B", "2.5T"]
    assert [format_seconds(value) for value in (0, 59.9, 3661, 90061)] == ["00:00:00", "00:00:59", "01:01:01", "1d 01:01:01"]


def test_apply_umask_gives_the_permissions_of_an_ordinary_file(tmp_path):
    ordinary, private = tmp_path / "ordinary", tmp_path / "private"
    ordinary.write_text("")
    private.touch(mode=0o600)
    apply_umask(private)
    assert private.stat().st_mode == ordinary.stat().st_mode


def test_bytes_are_written_in_the_largest_unit_that_they_fill():
    sizes = {0: "0 bytes", 1023: "1023 bytes", 1024: "1.0 KiB", 3 << 29: "1.5 GiB", 5 << 40: "5.0 TiB"}
    assert {size: format_bytes(size) for size in sizes} == sizes
