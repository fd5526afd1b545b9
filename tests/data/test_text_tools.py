"""tools/train_tokenizer.py and tools/make_recall_text.py: nothing is overwritten unasked, what cannot be written is found first."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from data_helpers import full_disk, write_jsonl

from megahedge.utils.errors import InputError, RunError


@pytest.fixture
def tool(monkeypatch):
    """A module of tools/ by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "tools"))
    yield importlib.import_module
    for name in ("make_recall_text", "train_tokenizer"):
        sys.modules.pop(name, None)


@pytest.fixture
def recall(tool):
    """Write recall text; options by name."""
    module = tool("make_recall_text")
    return lambda output, **options: module.make_recall_text(module.RecallConfig(str(output), **{"num_documents": 20} | options))


@pytest.fixture
def train(tool, tmp_path):
    """Train a tokenizer; options by name."""
    module = tool("train_tokenizer")
    source = str(write_jsonl(tmp_path / "text.jsonl", ["the cat sat on the mat"] * 5))

    def run(output_dir, **options):
        return module.train_tokenizer(
            module.TokenizerConfig(**{"input": (source,), "output_dir": str(output_dir), "vocab_size": 260} | options)
        )

    return run


def test_recall_text_replaces_a_file_only_when_told_to(tmp_path, recall):
    path = tmp_path / "a.jsonl"
    path.write_text("mine")
    with pytest.raises(InputError, match=r"a\.jsonl exists already; choose another --output, or give --overwrite"):
        recall(path)
    assert path.read_text() == "mine"
    recall(path, overwrite=True)
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 20


@pytest.mark.parametrize("output", ["{folder}/dd.jsonl", "{folder}/text.txt/a.jsonl", "/proc/a.jsonl"])
def test_recall_text_that_cannot_be_written_is_found_before_the_words_are_read(tmp_path, recall, output):
    (tmp_path / "dd.jsonl").mkdir()
    (tmp_path / "text.txt").touch()
    with pytest.raises(InputError, match=r"^--output=.* cannot be written: "):
        recall(output.format(folder=tmp_path), overwrite=True, words_from=("/no/such/text",))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_full_disk_ends_recall_text_in_one_line_and_leaves_nothing(tmp_path, recall, name):
    with full_disk(), pytest.raises(RunError, match=f"cannot write .*{name}: File too large"):
        recall(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_missing_text_is_named_with_its_option(recall, train, tmp_path):
    with pytest.raises(InputError, match=r"^--words_from=/no/such/text does not exist"):
        recall(tmp_path / "a.jsonl", words_from=("/no/such/text",))
    with pytest.raises(InputError, match=r"^--input=/no/such/text does not exist"):
        train(tmp_path / "new", input=("/no/such/text",))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_is_replaced_only_when_told_to(tmp_path, train, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=f"{name} exists already; choose another --output_dir, or give --overwrite"):
        train(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.jsonl", name]
    assert train(tmp_path, overwrite=True).get_vocab_size() == 260
    assert json.loads((tmp_path / name).read_text())


@pytest.mark.parametrize(
    ("output_dir", "message"),
    [
        ("", "--output_dir='' is empty"),
        ("{folder}/text.jsonl", "text.jsonl is not a folder"),
        ("/proc/x", "no such file can be made in /proc"),
    ],
)
def test_tokenizer_that_cannot_be_written_is_found_before_training(tmp_path, train, output_dir, message):
    with pytest.raises(InputError, match=f"^--output_dir=.*{message.removeprefix('--output_dir=')}"):
        train(output_dir.format(folder=tmp_path), input=("/no/such/text",))


@pytest.mark.parametrize("vocab_size", [256, 5_000_000_000_000])
def test_vocabulary_that_cannot_be_is_refused(tmp_path, train, vocab_size):
    with pytest.raises(InputError, match=rf"^--vocab_size={vocab_size} must lie between 257 .* and 1000000$"):
        train(tmp_path, vocab_size=vocab_size)
