"""tools/download.py: what it fetches lies where the other commands look, and bad input is one line."""

import concurrent.futures
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

from megahedge.data.find_sources import iterate_texts
from megahedge.evaluation import download as downloading
from megahedge.evaluation.download import DownloadOptions, download
from megahedge.evaluation.tasks import PAPER_METRICS
from megahedge.utils.errors import InputError
from tests.evaluation.small import byte_tokenizer, write_run

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the hub: a model and a data set, under the names that were asked for."""
    asked = []
    write_run(tmp_path / "run", digest=None)
    teacher = (tmp_path / "run" / "hf").rename(tmp_path / "snapshot")
    byte_tokenizer().save_pretrained(teacher)
    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    monkeypatch.setattr(downloading, "resolve_pretrained", lambda name, revision: asked.append((name, revision)) or teacher)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: asked.append((name, split)) or rows)
    return asked


def test_models_are_checked_and_text_becomes_an_input_of_preprocess(hub, tmp_path):
    folder = tmp_path / "data" / "raw"
    download(DownloadOptions(teacher=("someone/teacher",), teacher_revision="step1", text="someone/text", text_dir=str(folder)))
    assert hub == [("someone/teacher", "step1"), ("someone/text", "train")]
    assert list(iterate_texts([str(folder)])) == ["one", "two"]


def test_text_that_is_there_is_not_fetched_again(hub, tmp_path):
    options = DownloadOptions(text="someone/text", text_dir=str(tmp_path / "raw"))
    download(options)
    download(options)
    assert hub == [("someone/text", "train")]


def test_text_that_cannot_be_read_is_not_taken_for_done(hub, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "dataset_info.json").write_text("broken")
    with pytest.raises(InputError, match=r"--text_dir=.*raw holds text that cannot be read .*; remove it, or name a new folder"):
        DownloadOptions(text="someone/text", text_dir=str(tmp_path / "raw"))


def test_two_downloads_at_once_make_one_folder(hub, tmp_path):
    """As of two nodes: one waits while the other writes, and finds what it has written."""
    folder = tmp_path / "raw"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        options = DownloadOptions(text="someone/text", text_dir=str(folder))
        list(pool.map(download, [options, options]))
    assert list(iterate_texts([str(folder)])) == ["one", "two"]
    assert sorted(path.name for path in tmp_path.iterdir() if "raw" in path.name) == ["raw"]


@pytest.mark.parametrize("name", ["nobody/nothing", "/nowhere/x"])
def test_names_that_are_not_there_are_one_line_in_a_fresh_process(name):
    """Nothing has imported the hub's client before, as its parts are modules of their own."""
    code = "import sys; from megahedge.models import hub; hub.was_downloaded(sys.argv[1]); hub.resolve_pretrained(sys.argv[1])"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, env=environment)
    assert f"InputError: '{name}' is no local folder" in run.stderr.splitlines()[-1], run.stderr


def test_the_command_names_what_it_cannot_find():
    command = [sys.executable, str(REPOSITORY / "tools" / "download.py"), "--teacher", "nobody/nothing"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 2 and run.stderr.splitlines()[-1].startswith("error: 'nobody/nothing' is no local folder and could not be had")
    assert "Traceback" not in run.stderr


def test_rows_of_tasks_are_read_once_so_that_they_lie_in_the_cache(monkeypatch):
    task_data = pytest.importorskip("megahedge.evaluation.lm_eval.data", reason="lm-eval, the extra `eval`, is not installed")
    asked = []

    def find_tasks(names):
        asked.extend(names)
        tasks = {name: SimpleNamespace(eval_docs=[1, 2]) for name in names}
        return SimpleNamespace(load=lambda: contextlib.nullcontext(SimpleNamespace(tasks=tasks)))

    monkeypatch.setattr(task_data, "find_tasks", find_tasks)
    download(DownloadOptions(tasks=("paper", "piqa", "another")))
    assert asked == [*PAPER_METRICS, "another"]


def test_a_folder_with_other_files_is_left_alone(hub, tmp_path):
    folder = tmp_path / "raw"
    options = DownloadOptions(text="someone/text", text_dir=str(folder))
    folder.mkdir()
    (folder / "data_train.bin").write_text("precious")
    with pytest.raises(InputError, match="raw holds other files; name a new folder"):
        DownloadOptions(text="someone/text", text_dir=str(folder))
    with pytest.raises(InputError, match="raw holds other files"):
        download(options)
    assert [path.name for path in folder.iterdir()] == ["data_train.bin"]


def test_a_model_that_is_none_is_told_at_once(hub, tmp_path):
    (tmp_path / "snapshot" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config\.json"):
        download(DownloadOptions(teacher=("someone/teacher",)))


def test_text_that_cannot_be_had_leaves_no_folder(hub, tmp_path, monkeypatch):
    def fail(name, split):
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(InputError, match=r"^--text=someone/text cannot be had: no network$"):
        download(DownloadOptions(text="someone/text", text_dir=str(tmp_path / "raw")))
    assert not (tmp_path / "raw").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to fetch"),
        ({"text": "a/b"}, "they go together"),
        ({"teacher": ("a", "b"), "teacher_revision": "main"}, "goes with one --teacher; here are 2"),
        ({"text": "a/b", "text_dir": "/dev/null/x"}, "--text_dir=/dev/null/x cannot be written"),
    ],
)
def test_options_that_say_nothing_to_do_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        DownloadOptions(**options)
