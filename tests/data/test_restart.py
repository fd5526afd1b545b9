"""Preprocessing that is ended at any moment: the same command goes on and writes what an unbroken run would have written."""

import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from data_helpers import write_jsonl, write_pair
from test_preprocess import TEXTS, final_files, tokenizer_dir  # noqa: F401 (a fixture)

from megahedge.data import cutting
from megahedge.data import preprocess as module
from megahedge.data.find_sources import iterate_texts
from megahedge.data.preprocess import PreprocessConfig, preprocess
from megahedge.utils.errors import InputError

TEACHER = Path(__file__).resolve().parents[2] / "scripts" / "quickstart" / "teacher"
NUM_KILLS = 20


@pytest.fixture
def job(tmp_path, tokenizer_dir, monkeypatch):  # noqa: F811
    """Inputs of many chunks in three files of two words, and a function that preprocesses them; every chunk is committed."""
    monkeypatch.setattr(cutting, "_CHUNK_BYTES", 2000)
    monkeypatch.setattr(module, "_COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(module, "_COMMIT_SHARE", 1e9)
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder" / "1.jsonl", TEXTS[:120])
    write_jsonl(tmp_path / "folder" / "2.jsonl", TEXTS[120:200])
    write_jsonl(tmp_path / "single.jsonl", [*TEXTS[200:], ""])

    def run(name="out", **changes):
        inputs = (str(tmp_path / "folder"), str(tmp_path / "single.jsonl"))
        options = {"tokenizer": tokenizer_dir, "workers": 1, "val_fraction": 0.1, "input": inputs} | changes
        return preprocess(PreprocessConfig(output_prefix=str(tmp_path / name), **options))

    return run


def contents(folder, name):
    """Bytes of a dataset's files by their suffix; nothing else of that name may be there."""
    files = {path.name.removeprefix(name): path.read_bytes() for path in folder.iterdir() if path.name.lstrip(".").startswith(name)}
    assert sorted(files) == [".meta.json", "_train.bin", "_train.idx", "_val.bin", "_val.idx"]
    return files


class Killed(BaseException):
    """Ends a run as a signal would."""


@pytest.fixture
def break_at(monkeypatch):
    """A function that lets the n-th call of something fail, once."""

    def arm(owner, name, number):
        original, calls = getattr(owner, name), 0

        def counting(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == number:
                raise Killed
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, counting)

    return arm


@pytest.mark.parametrize(
    ("owner", "name", "numbers"),
    [
        (module._Totals, "add", (1, 2, 5, 9, 12)),  # before a chunk is written
        (module.IndexedDatasetWriter, "add_documents", (4, 9)),  # between the pairs
        (module.IndexedDatasetWriter, "commit", (3, 4, 21)),
        (module.Journal, "save", (1, 4, 11)),
        (module.IndexedDatasetWriter, "prepare", (1, 2)),
        (os, "replace", (3, 9)),
        (module, "publish_dataset", (1,)),
    ],
)
def test_a_broken_run_goes_on_and_ends_alike(job, break_at, tmp_path, monkeypatch, owner, name, numbers):
    job("whole")
    for number in numbers:
        original = getattr(owner, name)
        break_at(owner, name, number)
        with pytest.raises(Killed):
            job()
        monkeypatch.setattr(owner, name, original)
        job()
        assert contents(tmp_path, "out") == contents(tmp_path, "whole")
        for path in tmp_path.glob("out*"):
            path.unlink()


@pytest.mark.parametrize("number", [0, 3, 8, -1])
def test_a_kill_before_a_rename_leaves_no_file_behind(job, tmp_path, monkeypatch, number):
    """Of the journal, which every commit renames, and last of meta.json."""
    original, renames = os.replace, []

    def replace(source, target):
        renames.append(target)
        if len(renames) == number + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        original(source, target)

    monkeypatch.setattr(os, "replace", replace)
    number, wanted = -1, number
    job("whole")
    number = wanted % len(renames)
    assert str(renames[number]).endswith(".meta.json" if wanted == -1 else ".unfinished.json")
    renames.clear()
    process = multiprocessing.get_context("fork").Process(target=job)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".*out*.json.*.tmp"))) == 1
    monkeypatch.setattr(os, "replace", original)
    job()
    assert contents(tmp_path, "out") == contents(tmp_path, "whole")


class BrokenPublishing:
    """Publishes a dataset, and fails instead of the rename after `allowed` ones."""

    def __init__(self, allowed):
        self.allowed = allowed
        self.publish, self.replace = module.publish_dataset, os.replace

    def __call__(self, *arguments):
        os.replace = self._replace
        try:
            self.publish(*arguments)
        finally:
            os.replace = self.replace

    def _replace(self, source, target):
        if self.allowed == 0:
            raise Killed
        self.allowed -= 1
        self.replace(source, target)


def test_a_run_broken_while_it_is_published_is_published_whole(job, tmp_path, monkeypatch):
    """At every rename: none of them leaves a mixed dataset behind, and an older one is replaced."""
    job("whole")
    for allowed in range(5):  # two pairs of two files, and meta.json
        job(seed=99, overwrite=True)
        with monkeypatch.context() as context:
            context.setattr(module, "publish_dataset", BrokenPublishing(allowed))
            with pytest.raises(Killed):
                job(overwrite=True)
        job(overwrite=True)
        assert contents(tmp_path, "out") == contents(tmp_path, "whole")
    monkeypatch.setattr(module, "publish_dataset", BrokenPublishing(5))
    job(overwrite=True)


@pytest.fixture
def unfinished(job, break_at, monkeypatch):
    """A run that has been broken off after eight chunks."""
    add = module._Totals.add
    break_at(module._Totals, "add", 8)
    with pytest.raises(Killed):
        job()
    monkeypatch.setattr(module._Totals, "add", add)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 5}, r"--seed 1234 \(now 5\)"),
        ({"val_fraction": 0.2}, r"--val_fraction 0\.1 \(now 0\.2\)"),
        ({"append_eod": False}, r"--append_eod True \(now False\)"),
    ],
)
def test_other_options_are_refused_or_begin_anew(job, unfinished, tmp_path, changes, said):
    with pytest.raises(InputError, match=f"begun with {said}; use these again, or begin anew with --overwrite"):
        job(**changes)
    job("whole", **changes)
    job(overwrite=True, **changes)
    assert contents(tmp_path, "out") == contents(tmp_path, "whole")


def test_changed_inputs_are_refused_or_begin_anew(job, unfinished, tmp_path):
    write_jsonl(tmp_path / "folder" / "3.jsonl", ["more"])
    with pytest.raises(InputError, match=r"begun with --input 3 sources of .* \(now 4 sources of"):
        job()
    job(overwrite=True)
    job("whole")
    assert contents(tmp_path, "out") == contents(tmp_path, "whole")


def test_workers_may_change(job, unfinished, tmp_path):
    job(workers=2)
    job("whole")
    assert contents(tmp_path, "out") == contents(tmp_path, "whole")


def test_bad_lines_may_be_skipped_from_where_the_first_was_met(job, tmp_path):
    with open(tmp_path / "single.jsonl", "a") as handle:
        handle.write("broken\n" + json.dumps({"text": TEXTS[0] * 100}) + "\n")
    with pytest.raises(InputError, match=r"single\.jsonl:102: not JSON"):
        job()
    meta = job(on_bad_line="skip")
    assert meta.skipped == {"empty": 1, "invalid_json": 1}
    job("whole", on_bad_line="skip")
    assert contents(tmp_path, "out") == contents(tmp_path, "whole")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / ".out_train.bin.tmp").unlink(), "files of the unfinished work that .* tells of are gone"),
        (lambda folder: (folder / ".out_val.bin.sizes.tmp").write_bytes(b""), "files of the unfinished work that .* tells of are gone"),
        (lambda folder: (folder / ".out.unfinished.json").write_text('{"task": '), "which tells of unfinished work, cannot be read"),
        (lambda folder: (folder / ".out.unfinished.json").write_text("[]"), "which tells of unfinished work, cannot be read"),
    ],
)
def test_damaged_unfinished_work_is_named_and_can_be_thrown_away(job, unfinished, tmp_path, damage, message):
    damage(tmp_path)
    with pytest.raises(InputError, match=f"{message}.*; begin anew with --overwrite"):
        job()
    job(overwrite=True)
    job("whole")
    assert contents(tmp_path, "out") == contents(tmp_path, "whole")


def test_a_finished_pair_that_is_gone_before_it_is_published_is_missed(job, tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(module, "publish_dataset", BrokenPublishing(0))
        with pytest.raises(Killed):
            job()
    (tmp_path / ".out_val.idx.tmp").unlink()
    with pytest.raises(InputError, match="are gone; begin anew with --overwrite"):
        job()
    job(overwrite=True)
    job("whole")
    assert contents(tmp_path, "out") == contents(tmp_path, "whole")


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "old"])
def test_what_is_published_is_what_was_made(job, tmp_path, monkeypatch, damage):
    """Between the last write and the renames something else gets at the files, an older dataset standing there."""
    job(seed=99)
    with monkeypatch.context() as context:
        context.setattr(module, "publish_dataset", BrokenPublishing(0))
        with pytest.raises(Killed):
            job(overwrite=True)
    path = tmp_path / ".out_train.bin.tmp"
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[:-2])
    elif damage == "changed":
        content[100] ^= 1
        path.write_bytes(content)
    elif damage == "gone":
        path.unlink()
    else:
        for left in tmp_path.glob(".out*.tmp"):
            left.unlink()
    with pytest.raises(InputError, match="are gone; begin anew with --overwrite"):
        job()
    job(overwrite=True)
    job("whole")
    assert contents(tmp_path, "out") == contents(tmp_path, "whole")


@pytest.mark.parametrize("state", [{}, {"meta": None, "totals": 3}, {"meta": None, "totals": {"chunks": -1}}, {"meta": {}, "totals": {}}])
def test_a_journal_without_sense_is_named(job, unfinished, tmp_path, state):
    path = tmp_path / ".out.unfinished.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state": state}))
    with pytest.raises(InputError, match=r"unfinished\.json is damaged \(\w+\); begin anew with --overwrite"):
        job()
    job(overwrite=True)


def test_an_input_that_has_become_shorter_unnoticed_is_refused(job, unfinished, tmp_path):
    path = tmp_path / ".out.unfinished.json"
    content = json.loads(path.read_text())
    content["state"]["totals"]["chunks"] = 1000
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="is shorter than what was read of it before; begin anew with --overwrite"):
        job()


def test_a_bare_pair_is_not_vouched_for(job, tmp_path):
    write_pair(tmp_path / "out", [[1, 2, 3]])
    with pytest.raises(InputError, match=r"out\.idx is there, a pair that meta\.json would vouch for; choose another"):
        job(overwrite=True)


def test_unfinished_work_is_nothing_to_train_on(unfinished, tmp_path):
    assert not [name for name in final_files(tmp_path) if not name.startswith(".")]


def _preprocess_slowly(config):
    module._COMMIT_SECONDS = 0.05
    preprocess(config)


@pytest.mark.slow
def test_kill_9_at_random_moments(test_data, tmp_path):
    """Real processes, two workers, real text; each of twenty is killed once and its command given again."""
    for name in ("permissive", "openwebtext-1000"):
        texts = iterate_texts([str(test_data / "text" / f"{name}.jsonl.gz")])
        write_jsonl(tmp_path / f"{name}.jsonl", itertools.islice(texts, 250))
    config = PreprocessConfig(
        output_prefix=str(tmp_path / "whole"),
        tokenizer=str(TEACHER),
        input=tuple(str(tmp_path / f"{name}.jsonl") for name in ("permissive", "openwebtext-1000")),
        val_fraction=0.05,
        workers=2,
    )
    context = multiprocessing.get_context("fork")  # what takes long to import is there already
    started = time.monotonic()
    whole = context.Process(target=_preprocess_slowly, args=(config,))
    whole.start()
    whole.join()
    seconds = time.monotonic() - started
    moments, resumed = random.Random(7), 0
    for number in range(NUM_KILLS):
        mine = PreprocessConfig(**(vars(config) | {"output_prefix": str(tmp_path / f"out{number}")}))
        run = context.Process(target=_preprocess_slowly, args=(mine,))
        run.start()
        time.sleep(moments.uniform(0.0, 1.0) * seconds)
        os.kill(run.pid, signal.SIGKILL)
        run.join()
        finished = (tmp_path / f"out{number}.meta.json").exists()
        resumed += (tmp_path / f".out{number}.unfinished.json").exists()
        if not finished:
            again = context.Process(target=_preprocess_slowly, args=(mine,))
            again.start()
            again.join()
            assert again.exitcode == 0
        assert contents(tmp_path, f"out{number}") == contents(tmp_path, "whole")
        for path in tmp_path.glob(f"*out{number}*"):
            path.unlink()
    assert resumed  # else no kill fell into the work; how many do depends on the machine
