"""Both stages are the same computation however they are cut over processes."""

import numpy as np
import pytest

from tests.stages.conftest import FAST_ONE, FAST_TWO, REFERENCE, SLOW_ONE, SLOW_TWO, names_of
from tests.stages.runs import HALF, STEPS
from tests.training.runs import measured

# sums are taken in another order, and AdamW enlarges what that changes: 2e-5 of a value after eight steps where nothing is wrong
RELATIVE, ABSOLUTE = 1e-4, 1e-6
SHARE = 2e-3  # shares of some 1000 normalisers a step, of which one near the limit may fall on either side


def reference_of(name: str) -> str:
    flavour, stage, *_ = name.split("-")
    return f"{flavour}-{stage}-{REFERENCE}"


@pytest.mark.parametrize("name", names_of((*FAST_ONE, *FAST_TWO), (*SLOW_ONE, *SLOW_TWO)))
def test_every_cut_follows_the_curves_of_one_process(name, made):
    """Losses, their parts (of each layer, cross-entropy, KL), gradient norms, shares of normalisers, and validation losses."""
    mine, reference = measured(made(name)), measured(made(reference_of(name)))
    assert len(mine) == len(reference) == STEPS + 3
    for line, expected in zip(mine, reference, strict=True):
        assert line.keys() == expected.keys()
        for key in line.keys() - {"kind", "perplexity"}:
            tolerances = {"rtol": 0, "atol": SHARE} if key.startswith("normalizer") else {"rtol": RELATIVE, "atol": ABSOLUTE}
            np.testing.assert_allclose(line[key], expected[key], err_msg=f"{key} at step {line['step']}", **tolerances)


@pytest.mark.parametrize("flavour", ["paper", "tuned"])
def test_training_learns(flavour, made):
    """Stage 1 brings the layers together (means over halves, as each step sees other tokens), stage 2 lowers the validation loss."""
    losses = [line["loss"] for line in measured(made(f"{flavour}-1-zero1"), "train")]
    assert np.mean(losses[HALF:]) < np.mean(losses[:HALF])
    first, half, last = (line["loss"] for line in measured(made(f"{flavour}-2-zero1"), "eval"))
    assert last < half < first


@pytest.mark.parametrize("flavour", ["paper", "tuned"])
def test_stage_1_logs_the_loss_of_each_layer(flavour, made):
    for line in measured(made(f"{flavour}-1-zero1"), "train"):
        layers = [line["loss_layer_00"], line["loss_layer_01"]]
        assert "loss_layer_02" not in line
        assert line["loss"] == pytest.approx(np.mean(layers), rel=1e-6)


def test_stage_2_logs_both_parts_of_its_loss(made):
    for line in measured(made("tuned-2-zero1"), "train"):
        assert line["loss"] == pytest.approx(0.3 * line["cross_entropy"] + 0.7 * line["kl"], rel=1e-6)
        assert 0 < line["kl"] < line["cross_entropy"]
    assert not {"kl", "cross_entropy"} & measured(made("paper-2-zero1"), "train")[0].keys()


@pytest.mark.parametrize("stage", [1, 2])
def test_shares_of_bad_normalisers_are_logged_where_features_have_signs(stage, made):
    keys = {"normalizer_clamped", "normalizer_negative"}
    for line in measured(made(f"paper-{stage}-zero1"), "train"):
        assert all(0 <= line[key] < 1 for key in keys)
    assert not keys & measured(made(f"tuned-{stage}-zero1"), "train")[0].keys()


def test_stage_2_begins_where_stage_1_ended(made):
    for flavour in ("paper", "tuned"):
        last, first = measured(made(f"{flavour}-1-zero1"), "eval")[-1], measured(made(f"{flavour}-2-zero1"), "eval")[0]
        assert first["loss"] == pytest.approx(last["loss"], abs=1e-6)  # nats; the same function, in fp32
