"""A run that was interrupted ends, bit for bit, as one that was not."""

import json

import pytest
import torch

from megahedge.parallel.initialize import draw
from megahedge.parallel.sharding import Init
from tests.training.conftest import ZERO, tiered
from tests.training.runs import assert_same_end, checkpoint_at, curve, measured, state_of


@pytest.mark.parametrize("name", ZERO)
def test_twenty_steps_are_ten_and_ten(name, made):
    assert_same_end(made(f"{name}-halves"), made(name))


@pytest.mark.parametrize("name", ZERO)
def test_made_resume_exactly_with_skipped_steps_behind_them(name, made):
    assert_same_end(made(f"{name}-poisoned-resumed"), made(f"{name}-poisoned"))


@pytest.mark.parametrize("name", ZERO)
def test_tensor_parallel_runs_resume_exactly(name, made):
    assert_same_end(made(f"{name}-tp2-resumed"), made(f"{name}-tp2"))


@pytest.mark.parametrize("name", ZERO)
def test_parameters_that_ranks_cannot_halve_resume_exactly(name, made):
    """In bf16, where the starting values are written through the same door."""
    checkpoint = checkpoint_at(made(f"{name}-odd"), 1)
    embedding = checkpoint.read("parameters", "embedding.weight")
    assert embedding.numel() % 2 == 1
    assert torch.equal(embedding, draw("embedding.weight", tuple(embedding.shape), Init(0.02), seed=7))
    assert_same_end(made(f"{name}-odd-resumed"), made(f"{name}-odd"))


@pytest.mark.parametrize("name", ZERO)
def test_bf16_runs_resume_exactly(name, made):
    assert_same_end(made(f"{name}-bf16-resumed"), made(f"{name}-bf16"))


@pytest.mark.parametrize("name", ZERO)
def test_bf16_runs_learn(name, made):
    loss, reference = curve(made(f"{name}-bf16"), "loss"), curve(made(name), "loss")
    assert loss[-1] < loss[1] - 0.5
    assert abs(loss[-1] - reference[-1]) < 0.2  # bf16 has three digits, and the first update was skipped


@pytest.mark.parametrize("name", ZERO)
def test_bf16_masters_start_from_the_exact_fp32_values(name, made):
    """The first step of these runs is skipped, so its checkpoint holds the masters as the engine made them."""
    checkpoint = checkpoint_at(made(f"{name}-bf16"), 1)
    assert checkpoint.record["progress"]["updates"] == 0
    embedding = checkpoint.read("parameters", "embedding.weight")
    assert embedding.dtype == torch.float32
    assert torch.equal(embedding, draw("embedding.weight", tuple(embedding.shape), Init(0.02), seed=7))
    assert not torch.equal(embedding, embedding.bfloat16().float())
    exact = state_of(checkpoint_at(made(f"{name}-bf16"), 2))
    assert all(tensor.dtype == torch.float32 for tensor in exact.values())


def test_a_run_folder_tells_what_was_run(made):
    record = json.loads((made("zero1-halves") / "run.json").read_text())
    assert record["options"]["lr"] == 5e-3
    assert record["topology"]["zero_stage"] == 1
    assert record["resumed_at_step"] == 10
    assert [start["resumed_at_step"] for start in record["history"]] == [0]
    assert record["data"]["train"][0]["documents"] == 200
    assert record["packages"]["torch"] == torch.__version__
    assert record["code"]["version"]


def test_a_finished_run_holds_its_summary_and_the_model(made):
    summary = json.loads((made("zero1") / "summary.json").read_text())
    last = measured(made("zero1"), "eval")[-1]
    assert (summary["step"], summary["validation_loss"], summary["validation_tokens"]) == (20, last["loss"], 500)
    assert not (made("recomputing") / "summary.json").exists()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (made("zero1") / "hf").iterdir()}


def test_validation_follows_its_interval(made):
    assert [line["step"] for line in measured(made("zero1"), "eval")] == [0, 10, 20]
