"""Where an export may be written, and that what was there outlives refusals, failures and kills."""

import errno
import json
import os
import resource
from pathlib import Path

import pytest

from megahedge.export import source, to_hf
from megahedge.export.to_hf import ExportOptions, export
from megahedge.utils.errors import InputError, RunError
from tests.export.small import MIXERS, export_of, student, swap_heads, with_faulty_tensors, write_run


def test_only_a_hugging_face_folder_is_replaced_and_only_when_asked(root, tmp_path):
    out = tmp_path / "out"
    out.mkdir()  # an empty one is fine
    export_of(root, tmp_path, verify=False)
    with pytest.raises(InputError, match=r"holds a model already.*--overwrite"):
        export_of(root, tmp_path, verify=False)
    export_of(root, tmp_path, name="paper", overwrite=True, verify=False)
    assert json.loads((out / "config.json").read_text())["decay"] == "channel"
    (out / "mine.txt").write_text("figures of mine")
    with pytest.raises(InputError, match=r"holds mine\.txt, which no export writes"):
        export_of(root, tmp_path, overwrite=True, verify=False)
    assert (out / "mine.txt").read_text() == "figures of mine"
    (out / "notes").mkdir()
    with pytest.raises(InputError, match="is not replaced"):
        export_of(root, tmp_path, overwrite=True, verify=False)
    with pytest.raises(InputError, match="is a file"):
        export_of(root, tmp_path, out=str(out / "config.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _a_file(here):
    (here / "file").write_text("")
    return "{here}/file/out"


def _the_working_directory(here):
    (here / "cwd").mkdir()
    os.chdir(here / "cwd")
    return "."


PLACES = {
    "below a file": (_a_file, r"file is not a folder"),
    "a long name": (lambda here: "{here}/" + "x" * 250, "File name too long"),
    "a longer name": (lambda here: "{here}/" + "x" * 300, "File name too long"),
    "where nobody can write": (lambda here: "/proc/out", "no such file can be made in /proc"),
    "here": (_the_working_directory, "OUT=. is the folder that this command runs in"),
    "a disk": (lambda here: "/proc", "OUT=/proc is where a disk is mounted"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_place_where_no_folder_can_be_made_is_refused_before_the_work(place, root, tmp_path, monkeypatch):
    make, said = PLACES[place]
    monkeypatch.chdir(tmp_path)
    out = make(tmp_path).format(here=tmp_path)
    monkeypatch.setattr(source.StoredModel, "open", None)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=said):
        export_of(root, tmp_path, out=out)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_leads_to_the_new_folder(there, root, tmp_path, monkeypatch):
    """A tilde is the home folder, for the run too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    link, target = tmp_path / "link", tmp_path / "disk" / "out"
    link.symlink_to(target)
    if there:
        target.mkdir(parents=True)
    run = os.path.relpath(root / "tuned", tmp_path)
    assert export(ExportOptions(run=f"~/{run}", out="~/link", verify=False)).folder == link
    assert link.is_symlink() and (target / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"] and [*target.parent.iterdir()] == [target]


@pytest.mark.parametrize("too_large", ["weights", "tokenizer"])
def test_a_full_disk_is_one_line_and_leaves_nothing(too_large, root, tmp_path, monkeypatch):
    """No file may be larger than 1000 bytes; the libraries that write the largest ones have exceptions of their own for that."""
    write_run(tmp_path / "run", student(MIXERS["tuned"], num_layers=1), root / "teacher")
    if too_large == "tokenizer":
        monkeypatch.setattr(to_hf, "save_pretrained", lambda *arguments, **keywords: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RunError, match=r"^cannot write .*/out: File too large$"):
            export_of(tmp_path, tmp_path, "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_failure_leaves_the_folder_that_was_there(root, tmp_path, monkeypatch):
    export_of(root, tmp_path, verify=False)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    monkeypatch.setattr(to_hf, "save_pretrained", with_faulty_tensors(swap_heads))
    with pytest.raises(RunError):
        export_of(root, tmp_path, overwrite=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_rename_that_fails_leaves_the_folder_that_was_there(root, tmp_path, monkeypatch):
    before = (export_of(root, tmp_path, verify=False).folder / "model.safetensors").read_bytes()
    rename = Path.rename

    def failing(path, target):
        if Path(target).name == "out" and not path.name.startswith(".old"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(RunError, match=r"cannot write .*out: Input/output error"):
        export_of(root, tmp_path, name="paper", overwrite=True, verify=False)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_kill_between_the_renames_loses_no_model(root, tmp_path):
    """The next start puts the old one back, and replaces it only if it is asked to."""
    folder = export_of(root, tmp_path, verify=False).folder
    before = (folder / "model.safetensors").read_bytes()
    folder.rename(tmp_path / ".old-out")
    with pytest.raises(InputError, match=r"holds a model already.*--overwrite"):
        export_of(root, tmp_path, verify=False)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
