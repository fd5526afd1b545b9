"""A run that was interrupted ends, bit for bit, as one that was not."""

import json

import pytest
import torch

from megahedge.checkpoint.store import open_checkpoint
from megahedge.export.source import StoredModel
from megahedge.models.hf_weights import weights_digest
from megahedge.parallel.initialize import draw
from megahedge.parallel.sharding import Init
from tests.training.conftest import ZERO
from tests.training.runs import STEPS, assert_same_end, checkpoint_at, curve, measured, state_of
from tests.worlds import tiered


def zero_stages(*, slow: tuple[str, ...]):
    return pytest.mark.parametrize("name", tiered(*ZERO, slow=slow))


@zero_stages(slow=("zero0", "zero2"))
def test_twenty_steps_are_ten_and_ten(name, made):
    assert_same_end(made(f"{name}-halves"), made(name))


@zero_stages(slow=("zero0", "zero2"))
def test_two_processes_resume_exactly_with_skipped_steps_behind_them(name, made):
    assert_same_end(made(f"{name}-poisoned-resumed"), made(f"{name}-poisoned"))


@pytest.mark.parametrize(
    "name", tiered("zero1-tp2", *(f"{zero}-tp2-long" for zero in ("zero0", "zero2", "zero3")), slow=("zero0", "zero2", "zero3"))
)
def test_tensor_parallel_runs_resume_exactly(name, made):
    assert_same_end(made(f"{name}-resumed"), made(name))


@zero_stages(slow=("zero0", "zero1", "zero2"))
def test_parameters_that_ranks_cannot_halve_resume_exactly(name, made):
    assert checkpoint_at(made(f"{name}-odd"), STEPS).read("parameters", "embedding.weight").numel() % 2 == 1
    assert_same_end(made(f"{name}-odd-resumed"), made(f"{name}-odd"))


@zero_stages(slow=("zero0", "zero2"))
def test_bf16_runs_resume_exactly(name, made):
    assert_same_end(made(f"{name}-bf16-resumed"), made(f"{name}-bf16"))


@zero_stages(slow=("zero0", "zero2"))
def test_bf16_runs_learn(name, made):
    assert curve(made(f"{name}-bf16"), "loss")[-1] < curve(made(name), "loss")[0] - 0.5


@pytest.mark.parametrize(
    "name", tiered(*(f"{zero}-{kind}" for zero in ZERO for kind in ("bf16", "odd")), slow=("zero0", "zero1-odd", "zero2"))
)
def test_bf16_masters_start_from_the_exact_fp32_values(name, made):
    """The first steps of these runs are skipped, so the checkpoint of step 5 holds the masters as the engine made them."""
    checkpoint = checkpoint_at(made(name), 5)
    assert checkpoint.record["progress"]["updates"] == 0
    assert all(tensor.dtype == torch.float32 for tensor in state_of(checkpoint).values())
    for parameter in ("embedding.weight", "lm_head.weight"):
        master = checkpoint.read("parameters", parameter)
        assert torch.equal(master, draw(parameter, tuple(master.shape), Init(0.02), seed=7))
        assert not torch.equal(master, master.bfloat16().float())


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


def test_a_run_goes_on_from_given_weights(made):
    """Its first evaluation finds what the last one of the source found; 1e-3, because the source was exported in fp16."""
    weights = made("zero1") / "hf"
    assert measured(made("trained-on"), "eval")[0]["loss"] == pytest.approx(measured(made("zero1"), "eval")[-1]["loss"], abs=1e-3)
    assert json.loads((made("trained-on") / "run.json").read_text())["origin"]["weights"] == weights_digest(weights)


def test_validation_follows_its_interval(made):
    assert [line["step"] for line in measured(made("zero1"), "eval")] == [0, 10, 20]


@pytest.mark.parametrize("name", ["best", "best-halves"])
def test_the_checkpoint_with_the_lowest_validation_loss_is_kept(name, made):
    """It is of a step at which no save was due, and a resumed run knows it."""
    run = made(name)
    checkpoints = run / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"latest", "best", "step-00000008", f"step-{STEPS:08d}"}
    opened = open_checkpoint(checkpoints / "best")
    assert opened.step == opened.record["progress"]["step"] == 8
    assert_same_end(run, made("best"))
    assert StoredModel.open(checkpoints / "best").run == run
