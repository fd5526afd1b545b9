"""What there is to export is found with its tokenizer, and with no other."""

import json
import logging

import huggingface_hub
import pytest

from megahedge.evaluation.generation import GenerateOptions, Writer
from megahedge.export.source import StoredModel
from megahedge.export.to_hf import ExportOptions, export
from megahedge.models.hub import was_downloaded
from megahedge.utils.errors import InputError
from tests.export.small import MIXERS, student, write_run, write_teacher


@pytest.fixture
def run(tmp_path):
    """A run whose teacher has got another tokenizer since."""
    write_teacher(tmp_path / "teacher")
    write_run(tmp_path / "run", student(MIXERS["tuned"]), tmp_path / "teacher")
    return tmp_path / "run"


def swap_two_tokens(folder):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))


def test_a_tokenizer_that_was_replaced_is_not_used(run, tmp_path, caplog):
    tokenizer, digest = StoredModel.open(run).find_tokenizer()
    assert tokenizer is not None
    swap_two_tokens(tmp_path / "teacher")
    with caplog.at_level(logging.WARNING, logger="megahedge"):
        assert StoredModel.open(run).find_tokenizer() == (None, digest)
    assert "it has been replaced and is not used" in caplog.text
    with pytest.raises(InputError, match="has no tokenizer with it"):
        Writer(run, GenerateOptions(model=str(run), prompt="a"))
    with pytest.raises(InputError, match="give --tokenizer"):
        export(ExportOptions(run=str(run), out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_a_name_on_the_hub_is_told_from_a_folder_by_the_hubs_cache(tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    assert was_downloaded("some/model")
    assert not any(map(was_downloaded, ("runs/teacher", "teacher", "/some/where/teacher", "a/b/c", "")))
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert not was_downloaded("some/model")  # a folder of that name is what the run has read
