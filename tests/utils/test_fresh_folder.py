"""A folder that is replaced is never lost: all of the old one is there or all of the new one."""

from pathlib import Path

import pytest

from megahedge.utils.files import fresh_folder


@pytest.fixture
def folder(tmp_path):
    """One that holds an old file."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "file").write_text("old")
    return path


def replace(folder):
    with fresh_folder(folder) as new:
        (new / "file").write_text("new")


def assert_holds(folder, content):
    """And nothing lies beside it."""
    assert (folder / "file").read_text() == content
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def fail_renames(monkeypatch, *fails):
    """Those renames, counted from 0, raise."""
    count, rename = iter(range(100)), Path.rename

    def failing(path, target):
        if next(count) in fails:
            raise OSError("the disk has gone")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)


def test_a_folder_is_made_or_replaced(folder):
    replace(folder)
    assert_holds(folder, "new")
    replace(folder.parent / "another")
    assert (folder.parent / "another" / "file").read_text() == "new"


def test_an_error_leaves_the_old_one(folder):
    with pytest.raises(ZeroDivisionError), fresh_folder(folder) as new:
        (new / "file").write_text("new")
        raise ZeroDivisionError
    assert_holds(folder, "old")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rename_that_fails_leaves_the_old_one(failing, folder, monkeypatch):
    fail_renames(monkeypatch, failing)
    with pytest.raises(OSError, match="has gone"):
        replace(folder)
    assert_holds(folder, "old")


def test_what_could_not_be_put_back_is_put_back_by_the_next_call(folder, monkeypatch):
    """As after a kill between the two renames."""
    with monkeypatch.context() as patch:
        fail_renames(patch, 1, 2)
        with pytest.raises(OSError, match="has gone"):
            replace(folder)
    assert not folder.exists()
    with pytest.raises(ZeroDivisionError), fresh_folder(folder):
        assert (folder / "file").read_text() == "old"
        raise ZeroDivisionError
    assert_holds(folder, "old")


def test_half_a_new_folder_of_a_killed_process_is_removed(folder):
    unfinished = folder.with_name(".unfinished-model") / "model"
    unfinished.mkdir(parents=True)
    (unfinished / "more").write_text("half")
    replace(folder)
    assert_holds(folder, "new")
    assert [path.name for path in folder.iterdir()] == ["file"]
