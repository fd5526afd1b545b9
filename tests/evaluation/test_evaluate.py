"""scripts/evaluate.py: figures by hand, runs and their exports agree, every bad input is one line."""

import dataclasses
import gc
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megahedge.checkpoint.store import CheckpointWriter, open_checkpoint
from megahedge.data.indexed_dataset import IndexedDataset
from megahedge.data.indexed_writer import IndexedDatasetWriter
from megahedge.data.meta import meta_path, tokenizer_digest
from megahedge.evaluation import evaluate as evaluating
from megahedge.evaluation.evaluate import evaluate
from megahedge.evaluation.models import open_model
from megahedge.evaluation.options import EvaluateOptions
from megahedge.evaluation.text import TextCounts, count_text
from megahedge.models.language_model import LanguageModel
from megahedge.utils.errors import InputError, RunError
from tests.evaluation.small import TEXTS, byte_tokenizer, write_run, write_texts
from tests.evaluation.students import write_student

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    """A run with its export, data that fits it, and data of another tokenizer."""
    root = tmp_path_factory.mktemp("evaluate")
    write_run(root / "run", tokenizer_digest(byte_tokenizer()))
    byte_tokenizer().save_pretrained(root / "run" / "hf")
    write_texts(root / "data", byte_tokenizer())
    write_texts(root / "other", byte_tokenizer(reverse=True))
    return {name: str(root / name) for name in ("run", "data", "other")} | {"hf": str(root / "run" / "hf")}


def options(paths, **changes) -> EvaluateOptions:
    return EvaluateOptions(**{"model": paths["hf"], "data_path": paths["data"], "seq_len": 32} | changes)


def test_figures_are_those_computed_by_hand(paths, tmp_path):
    """One token a byte: bytes are the scored tokens that are not EOD; token 0, the t of `the`, is not scored."""
    texts = ["the cat sat", "on  a\nmat"]
    write_texts(tmp_path / "data", byte_tokenizer(), texts)
    evaluation = evaluate(options(paths, data_path=str(tmp_path / "data")))
    figures = evaluation.figures()
    assert (figures["tokens"], figures["words"], figures["text_bytes"]) == (10 + 1 + 9 + 1, 6, 10 + 9)
    nats = figures["nats"]
    assert figures["loss"] == nats / 21
    assert figures["token_perplexity"] == math.exp(nats / 21)
    assert figures["word_perplexity"] == math.exp(nats / 6)
    assert figures["bits_per_byte"] == nats / math.log(2) / 19


def test_counts_of_whole_documents_are_those_of_their_texts(tmp_path):
    dataset = write_texts(tmp_path / "data", byte_tokenizer())
    expected = TextCounts(sum(len(text.split()) for text in TEXTS), sum(len(text.encode()) for text in TEXTS))
    assert count_text(dataset, 0, dataset.num_tokens, byte_tokenizer(), 0) == expected


@pytest.mark.parametrize(("start", "stop", "expected"), [(1, 7, (2, 6)), (4, 4, (0, 0)), (11, 12, (0, 0)), (10, 14, (2, 3))])
def test_counts_are_of_the_range_alone(tmp_path, start, stop, expected):
    dataset = write_texts(tmp_path / "data", byte_tokenizer(), ["the cat sat", "on a mat"])  # EODs at 11 and 20
    assert count_text(dataset, start, stop, byte_tokenizer(), 0) == TextCounts(*expected)


def test_documents_are_divided_without_eod_and_eods_within_a_document(tmp_path):
    tokenizer = byte_tokenizer()
    with IndexedDatasetWriter(tmp_path / "foreign", np.uint16) as writer:
        for text in ("ab", "cd<|endoftext|><|endoftext|>ef"):
            writer.add_document(tokenizer(text)["input_ids"])
        writer.finish()
    assert count_text(IndexedDataset(tmp_path / "foreign"), 0, 8, tokenizer, 0) == TextCounts(3, 6)


def test_run_checkpoint_and_export_agree_whoever_scores_them(paths):
    step = str(Path(paths["run"]) / "checkpoints" / "step-00000007")
    names = [paths["run"], str(Path(paths["run"]) / "checkpoints"), step, paths["hf"]]
    evaluations = [evaluate(options(paths, model=name)) for name in names]
    assert all(evaluation.figures() == evaluations[0].figures() for evaluation in evaluations)
    assert [evaluation.source.step for evaluation in evaluations] == [7, 7, 7, None]
    assert all(evaluation.tokenizer_digest == tokenizer_digest(byte_tokenizer()) for evaluation in evaluations)
    independent = evaluate(options(paths, implementation="transformers"))
    assert independent.source.implementation == "transformers"
    assert independent.source.loaded == evaluations[0].source.loaded == 28
    assert independent.perplexity.nats == pytest.approx(evaluations[0].perplexity.nats, rel=1e-6)  # fp32 logits of two implementations


@pytest.mark.parametrize("implementation", ["megahedge", "transformers"])
def test_bf16_is_near_fp32(paths, implementation):
    losses = {dtype: evaluate(options(paths, implementation=implementation, dtype=dtype)).perplexity.loss for dtype in ("fp32", "bf16")}
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)  # bf16 rounds to 4e-3


def test_model_without_tokenizer_is_scored_per_token(paths, tmp_path):
    """Data made elsewhere, by a tokenizer that is not at hand."""
    write_run(tmp_path / "run", None)
    figures = evaluate(options(paths, model=str(tmp_path / "run"))).figures()
    expected = evaluate(options(paths)).figures()
    assert figures["token_perplexity"] == expected["token_perplexity"]
    assert (figures["word_perplexity"], figures["bits_per_byte"], figures["words"]) == (None, None, None)


def test_data_without_meta_is_scored(paths, tmp_path):
    write_texts(tmp_path / "data", byte_tokenizer())
    meta_path(tmp_path / "data").unlink()
    assert evaluate(options(paths, data_path=str(tmp_path / "data_val"))).figures() == evaluate(options(paths)).figures()


def test_context_probe_is_reported(paths):
    evaluation = evaluate(options(paths, context_probe=True, probe_windows=5))
    assert evaluation.probe.windows == 5
    assert "5 windows" in evaluation.table()
    assert evaluation.record()["context_probe"]["difference"] == evaluation.probe.difference


def damaged_run(root, change) -> str:
    """A run whose checkpoint was written from changed tensors or another record."""
    write_run(root / "sound", None)
    sound = open_checkpoint(root / "sound")
    tensors = {name: sound.read("parameters", name) for name in sound.names("parameters")}
    record = dict(sound.record)
    change(tensors, record)
    writer = CheckpointWriter(root / "damaged" / "checkpoints", 1)
    for name, tensor in tensors.items():
        writer.add("parameters", name, tensor)
    writer.finish(record)
    return str(root / "damaged")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, record: tensors.pop("final_norm.bias"), "1 missing .final_norm.bias., 0 unexpected"),
        (lambda tensors, record: tensors.update(gate=torch.zeros(2)), "0 missing .*, 1 unexpected .gate."),
        (lambda tensors, record: record["model"]["mixer"].update(kind="hedgehog"), "8 missing .*query_map.*, 0 unexpected"),
        (lambda tensors, record: record["model"]["mixer"].update(kind="hedge_mamba"), "missing .*conv.*, 0 unexpected"),
        (lambda tensors, record: record["model"].pop("mixer"), "another version"),
        (lambda tensors, record: record["model"].update(num_experts=4), "another version"),
        (lambda tensors, record: record.pop("model"), "another version"),
    ],
)
def test_checkpoint_that_is_not_the_whole_model_is_refused(tmp_path, paths, change, message):
    with pytest.raises(InputError, match=message):
        evaluate(options(paths, model=damaged_run(tmp_path, change)))


@pytest.mark.parametrize("implementation", ["megahedge", "transformers"])
def test_folder_that_lacks_a_tensor_is_refused(tmp_path, paths, implementation):
    folder = shutil.copytree(paths["hf"], tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    del tensors["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"gpt_neox\.layers\.1\.mlp\.dense_h_to_4h\.weight"):
        evaluate(options(paths, model=str(folder), implementation=implementation))


def test_loss_that_is_not_a_number_is_an_error(tmp_path, paths):
    folder = shutil.copytree(paths["hf"], tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    tensors["gpt_neox.final_layer_norm.bias"][0] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match="nan"):
        evaluate(options(paths, model=str(folder)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "no/such/model"}, "no/such/model.*no local folder"),
        ({"model": "{data}_val.bin"}, "is a file"),
        ({"model": "{root}"}, "neither a run .* nor a Hugging Face folder"),
        ({"data_path": "no/such/data"}, "no dataset at --data_path=no/such/data"),
        ({"data_path": "{other}"}, "not with that of /"),
        ({"data_path": "{other}", "model": "{run}"}, "not with that of /"),
        ({"split": "train"}, "no dataset"),
        ({"split": "test"}, "--split=test.*train, val"),
        ({"seq_len": 65}, "--seq_len=65.*max_position_embeddings=64"),
        ({"seq_len": 65, "implementation": "transformers"}, "--seq_len=65.*max_position_embeddings=64"),
        ({"seq_len": 0}, "--seq_len=0"),
        ({"seq_len": 1, "context_probe": True}, "--seq_len=1 must be at least 2"),
        ({"eval_tokens": 0}, "--eval_tokens=0"),
        ({"eval_tokens": 20, "context_probe": True, "probe_windows": 1}, "--probe_windows=1"),
        ({"micro_batch_size": 0}, "--micro_batch_size=0"),
        ({"dtype": "fp8"}, "--dtype=fp8.*fp32, bf16"),
        ({"implementation": "jax"}, "--implementation=jax.*auto, megahedge, transformers"),
        ({"implementation": "transformers", "model": "{run}"}, "is a run: give its exported folder"),
        ({"output": "{root}"}, "--output=.*is a folder"),
        ({"output": "{data}_val.bin/x.json"}, "--output=.*_val.bin is not a folder"),
        ({"output": "/proc/x.json"}, "--output=/proc/x.json cannot be written"),
        ({"output": "/dev/null"}, "--output=/dev/null .* is no ordinary file"),
    ],
)
def test_bad_input_is_one_line(paths, tmp_path, changes, message):
    known = paths | {"root": str(tmp_path)}
    changes = {name: value.format(**known) if isinstance(value, str) else value for name, value in changes.items()}
    with pytest.raises(InputError, match=message) as caught:
        evaluate(options(paths, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("dtype", "fp8"), ("implementation", "jax")])
def test_what_no_model_can_be_opened_with_is_refused_before_anything_is_read(name, value):
    with pytest.raises(InputError, match=f"--{name}={value} is not known; use one of"):
        EvaluateOptions(model="no/such/model", **{name: value})


@pytest.mark.parametrize(
    ("teacher", "message"), [("no/such/model", "no/such/model"), ("{misfit}", "not with that of .*misfit"), ("{short}", "=16 of .*short")]
)
def test_a_teacher_that_does_not_fit_is_told_before_the_model_is_scored(paths, tmp_path, monkeypatch, teacher, message):
    def measure(*_):
        raise AssertionError("the model was scored")

    monkeypatch.setattr(evaluating, "measure_perplexity", measure)
    shutil.copytree(paths["hf"], tmp_path / "misfit")
    byte_tokenizer(reverse=True).save_pretrained(tmp_path / "misfit")
    config = json.loads((Path(paths["hf"]) / "config.json").read_text()) | {"max_position_embeddings": 16}
    shutil.copytree(paths["hf"], tmp_path / "short")
    (tmp_path / "short" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=message):
        evaluate(options(paths, teacher=teacher.format(misfit=tmp_path / "misfit", short=tmp_path / "short")))


@pytest.mark.parametrize("implementation", ["megahedge", "transformers"])
def test_one_model_at_a_time_is_in_memory(paths, monkeypatch, implementation):
    """Model and teacher together may not fit.  Unreachable, too: nothing waits for the garbage collector."""
    kinds = (LanguageModel, transformers.GPTNeoXForCausalLM)

    def opened(*arguments):
        gc.collect() if not alive else None  # what other tests have left
        alive.append(sum(type(thing) in kinds for thing in gc.get_objects()))
        return open_model(*arguments)

    alive: list[int] = []
    monkeypatch.setattr(evaluating, "open_model", opened)
    gc.disable()
    try:
        evaluation = evaluate(options(paths, teacher=paths["hf"], implementation=implementation))
    finally:
        gc.enable()
    assert evaluation.teacher.figures() == evaluation.figures()
    assert len(alive) == 3 and set(alive) == {alive[0]}


def run_script(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, str(REPOSITORY / "scripts" / "evaluate.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_script_prints_a_table_and_writes_json(paths, tmp_path):
    output = tmp_path / "folder" / "figures.json"
    done = run_script("--model", paths["run"], "--data_path", paths["data"], "--seq_len", 32, "--eval_tokens", "0.2K", "--output", output)
    assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text())
    assert f"token perplexity  {record['figures']['token_perplexity']:.6g}" in done.stdout
    assert "28 tensors loaded, 0 missing, 0 unexpected" in done.stdout
    assert record["figures"]["tokens"] == record["options"]["eval_tokens"] == 200
    expected = dataclasses.asdict(options(paths, model=paths["run"], eval_tokens=200, output=str(output)))
    assert record["options"] == json.loads(json.dumps(expected))
    assert record["model"]["step"] == 7
    assert len(record["data"]["idx_sha256"]) == len(record["data"]["tokenizer_digest"]) == 64
    assert record["packages"]["torch"] and "version" in record["code"]


def test_script_ends_bad_input_with_one_line_and_status_2(paths):
    done = run_script("--model", "no/such/model", "--data_path", paths["data"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --model: 'no/such/model'") and done.stderr.count("\n") == 1


@torch.no_grad()
def test_documents_are_kept_apart_by_models_of_ours_alone(tmp_path):
    """A run does; the same student's export is a class of transformers, and says what to give instead."""
    student = write_student(tmp_path)
    tokens = torch.arange(12).view(1, 12)
    boundaries = torch.zeros_like(tokens, dtype=torch.bool)
    boundaries[0, 5] = True
    run = open_model(student["run"])
    assert not torch.equal(run.token_losses(tokens, tokens, boundaries), run.token_losses(tokens, tokens))
    with pytest.raises(InputError, match=r"--reset_at_documents: .*hf is scored by a class of transformers.* give a run"):
        open_model(student["hf"]).token_losses(tokens, tokens, boundaries)
