"""scripts/evaluate.py scores runs of both stages as the runs scored themselves."""

import pytest

from megahedge.evaluation.evaluate import evaluate
from megahedge.evaluation.models import open_model
from megahedge.evaluation.options import EvaluateOptions
from tests.stages.runs import STEPS
from tests.training.runs import SEQ_LEN, checkpoint_at, measured

NAMES = ("paper-1-zero1", "tuned-1-zero3", "paper-2-zero1", "tuned-2-zero3", "tuned-2-zero1-dp2", "paper-2-zero1-tp2", "mamba-2-zero1")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_scores_what_its_own_last_evaluation_found(name, inputs, made):
    options = EvaluateOptions(model=str(made(name)), data_path=str(inputs / "data"), seq_len=SEQ_LEN, eval_tokens=500)
    evaluation = evaluate(options)
    assert evaluation.perplexity.loss == pytest.approx(measured(made(name), "eval")[-1]["loss"], abs=1e-5)  # nats; fp32
    source = evaluation.source
    assert (source.kind, source.step) == (f"stage{name.split('-')[1]}", STEPS)
    assert source.loaded == len(checkpoint_at(made(name), STEPS).names("parameters"))
    assert evaluation.text.words > 0  # decoded by the tokenizer of the teacher or of the data


@pytest.mark.parametrize("stage", [1, 2])
def test_a_run_that_keeps_documents_apart_is_scored_so(stage, inputs, made):
    """Run and script alike; with documents that see each other the figures are others."""
    run = made(f"documents-{stage}")
    losses = {}
    for apart in (True, False):
        options = EvaluateOptions(
            model=str(run), data_path=str(inputs / "data"), seq_len=SEQ_LEN, eval_tokens=500, reset_at_documents=apart
        )
        losses[apart] = evaluate(options).perplexity.loss
    assert losses[True] == pytest.approx(measured(run, "eval")[-1]["loss"], abs=1e-5)
    assert abs(losses[False] - losses[True]) > 1e-4
    plain, apart = (measured(made(name), "train") for name in (f"tuned-{stage}-zero1", f"documents-{stage}"))
    assert [line["step"] for line in plain] == [line["step"] for line in apart]
    assert all(abs(one["loss"] - other["loss"]) > 1e-5 for one, other in zip(plain, apart, strict=True))


def test_a_checkpoint_before_the_last_scores_as_itself(inputs, made):
    """The evaluation at half of the steps saw what the checkpoint there holds."""
    half = measured(made("tuned-2-zero1"), "eval")[1]
    checkpoint = checkpoint_at(made("tuned-2-zero1"), half["step"]).path
    options = EvaluateOptions(model=str(checkpoint), data_path=str(inputs / "data"), seq_len=SEQ_LEN, eval_tokens=500)
    assert evaluate(options).perplexity.loss == pytest.approx(half["loss"], abs=1e-5)


@pytest.mark.parametrize("name", ["paper-1-zero1", "tuned-2-zero1", "tuned-2-zero3-bf16"])
def test_bf16_scores_are_near_those_of_fp32(name, inputs, made):
    losses = {}
    for dtype in ("fp32", "bf16"):
        options = EvaluateOptions(model=str(made(name)), data_path=str(inputs / "data"), seq_len=SEQ_LEN, eval_tokens=500, dtype=dtype)
        losses[dtype] = evaluate(options).perplexity.loss
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)  # bf16 rounds to 4e-3


def test_the_tokenizer_of_a_run_is_its_teachers(made):
    opened = open_model(made("tuned-2-zero1"))
    assert opened.tokenizer_digest == checkpoint_at(made("tuned-2-zero1"), STEPS).record["data"]["tokenizer_digest"]
    assert opened.max_seq_len == 64
