"""Stage 2 begins as exactly the function that stage 1 has learnt, or it does not begin."""

import json

import pytest
import torch

from megahedge.config.model import ModelConfig
from megahedge.config.options import Stage2Options
from megahedge.models.language_model import LanguageModel
from megahedge.parallel.sharding import load_parameters
from megahedge.parallel.topology import TensorParallel
from megahedge.stages.stage2 import Stage2, plan_stage2
from tests.stages.conftest import MUTANTS, NO_STAGE_1
from tests.stages.runs import HALF, STEPS
from tests.training.runs import checkpoint_at, measured


@pytest.mark.parametrize("name", ["paper-1-zero1", "tuned-1-zero3", "tuned-1-zero1-bf16", "tuned-1-zero1-dp2", "paper-1-zero1-tp2"])
def test_each_stage_1_checkpoint_holds_a_probe_of_its_own_parameters(name, made):
    for step in (HALF, STEPS):
        checkpoint = checkpoint_at(made(name), step)
        model = LanguageModel(ModelConfig.from_record(checkpoint.record["model"])).eval().double()
        load_parameters(model, lambda name, index, checkpoint=checkpoint: checkpoint.read("parameters", name, index), model.tensor_parallel)
        tokens, logits = (checkpoint.read("probe", name) for name in ("tokens", "logits"))
        assert logits.dtype == torch.float32 and logits.shape == (*tokens.shape, 97)
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).float(), logits, rtol=0, atol=1e-6)  # the same operations, layer by layer, in fp64


def proof(made, name: str) -> str:
    made(name)
    (line,) = (line for line in made.outcomes[name].log if "hand-over proven" in line)
    return line


@pytest.mark.parametrize("name", ["paper-2-zero1", "tuned-2-zero3", "tuned-2-zero1-dp2", "paper-2-zero1-tp2", "no-stage-1"])
def test_the_hand_over_is_proven_and_said(name, made):
    assert float(proof(made, name).split("KL ")[1].split()[0]) <= 1e-8


def test_the_start_is_told_and_a_stage_1_that_has_not_ended_warned_of(made):
    made("unfinished-start")
    log = made.outcomes["unfinished-start"].log
    assert any(f"unfinished has not ended; stage 2 starts from its step {STEPS}" in line for line in log)
    assert any(line.startswith("start ") and f"step {STEPS} of stage1" in line for line in log)
    made("tuned-2-zero1")
    assert not any("has not ended" in line for line in made.outcomes["tuned-2-zero1"].log)


def test_bf16_runs_are_proven_in_fp32(made):
    """In bf16 no two models would agree to 1e-8; this one starts from a stage 1 that was trained in fp32."""
    assert proof(made, "tuned-2-zero3-bf16") == proof(made, "tuned-2-zero1")


REFUSED = (*(f"mutant-{mutant}" for mutant in MUTANTS), "mutant-no-stage-1", "mutant-bf16", "mutant-probe", "mutant-tp2")


@pytest.mark.parametrize("name", REFUSED)
def test_a_student_that_is_not_what_stage_1_has_learnt_takes_no_step(name, made):
    """Gate bias 1.0, or rounded to bf16; convolution one tap early; rates of 1e-3; and a probe of other logits.  All ranks refuse."""
    run = made(name)
    assert made.outcomes[name].error.startswith("RunError: the hand-over is not exact: ")
    assert [path.name for path in run.iterdir()] == [".lock"]


def test_rates_are_set_after_the_proof(made):
    """The run's learning rate of 1e-9 leaves them where they were set."""
    log = list(made.outcomes["rates-set"].log) if made("rates-set") else []
    assert log.index(proof(made, "rates-set")) < next(index for index, line in enumerate(log) if "start at 0.25" in line)
    checkpoint = checkpoint_at(made("rates-set"), 1)
    for layer in (0, 1):
        rates = checkpoint.read("parameters", f"blocks.{layer}.mixer.decay.rate.weight")
        torch.testing.assert_close(rates, torch.full_like(rates, 0.25), rtol=0, atol=1e-6)
    assert measured(made("rates-set"), "eval")[0]["loss"] != measured(made("tuned-2-zero1"), "eval")[0]["loss"]


def test_a_start_without_stage_1_is_on_record(made):
    record = json.loads((made("no-stage-1") / "run.json").read_text())
    assert (record["origin"]["stage1_steps"], record["origin"]["init_from"]) == (0, None)
    assert record["origin"]["weights"] == json.loads((made("tuned-1-zero1") / "run.json").read_text())["origin"]["weights"]
    assert checkpoint_at(made("no-stage-1"), 1).record["origin"]["stage1_steps"] == 0


def test_a_mamba_starts_without_a_proof_and_says_so(made):
    """It is the teacher around mixers that nobody has trained; log and record tell, and nothing of a normaliser is logged."""
    log = made.outcomes["mamba-2-zero1"].log if made("mamba-2-zero1") else ()
    assert "mixers of kind mamba start afresh: there is no hand-over to prove" in log
    assert not any("proven" in line for line in log)
    for name, proven in (("mamba-2-zero1", False), ("no-stage-1", True), ("tuned-2-zero1", True)):
        assert json.loads((made(name) / "run.json").read_text())["origin"]["handover_proven"] is proven
    assert checkpoint_at(made("mamba-2-zero1"), STEPS).record["origin"]["handover_proven"] is False
    start, teacher = measured(made("mamba-2-zero1"), "eval")[0], measured(made("pretrained"), "eval")[-1]
    assert start["loss"] > teacher["loss"] + 0.02  # nats; 0.05 measured, little being what so small a teacher has learnt to mix
    keys = measured(made("mamba-2-zero1"), "train")[0].keys()
    assert "kl" in keys and not any(key.startswith("normalizer") for key in keys)


def test_all_of_a_mamba_learns_at_the_rate_of_what_is_new(options):
    values = Stage2Options(**options(2, mixer="mamba", decay_init=0.5, lr=1e-3, lr_new=1e-2, **NO_STAGE_1))
    with torch.device("meta"):
        stage = Stage2(plan_stage2(values).model, TensorParallel(), values)
    scales = {name: parameter.lr_scale for name, parameter in stage.student.named_parameters() if parameter.requires_grad}
    assert scales == {name: pytest.approx(10.0 if ".mixer." in name else 1.0) for name in scales}
    assert sum(".mixer." in name for name in scales) == 2 * 13
