"""What the checkpoints of both stages hold: the whole student, moments of what trains, and what is frozen as it was given."""

import json

import pytest
import torch

from megahedge.config.model import ModelConfig
from megahedge.models.hf_weights import PretrainedWeights, weights_digest
from tests.stages.conftest import FAST_BF16, FAST_ONE, FAST_TWO, SLOW_BF16, SLOW_ONE, SLOW_TWO, names_of
from tests.stages.runs import HALF, STEPS, TEACHER
from tests.training.runs import checkpoint_at

EMBEDDINGS = {"embedding.weight", "lm_head.weight"}
FAST_DECAYS, SLOW_DECAYS = (
    tuple(name for names in tier for name in names if "-2-" in name and not name.startswith("mamba"))
    for tier in ((FAST_ONE, FAST_TWO, FAST_BF16), (SLOW_ONE, SLOW_TWO, SLOW_BF16))
)


def parameters_with_moments(checkpoint) -> set[str]:
    return {name.rpartition(".")[0] for name in checkpoint.names("optimizer")}


@pytest.fixture
def teacher(inputs, made) -> PretrainedWeights:
    config = ModelConfig.from_record(checkpoint_at(made("tuned-1-zero1"), STEPS).record["model"])
    return PretrainedWeights(config, inputs / TEACHER)


@pytest.mark.parametrize("name", ["paper-1-zero1", "tuned-1-zero3", "tuned-1-zero1-bf16", "tuned-1-zero1-dp2", "paper-1-zero1-tp2"])
def test_stage_1_trains_feature_maps_and_keeps_the_teacher_as_its_files_have_it(name, made, teacher):
    """In fp16, also where the run held it rounded to bf16 or cut in pieces."""
    for step in (HALF, STEPS):
        checkpoint = checkpoint_at(made(name), step)
        maps = {name for name in checkpoint.names("parameters") if "_map." in name}
        assert parameters_with_moments(checkpoint) == maps and len(maps) == 2 * 2 * 2  # layers, of queries and keys, weight and bias
        frozen = set(checkpoint.names("parameters")) - maps
        assert len(frozen) == len(teacher)
        for parameter in frozen:
            kept, given = checkpoint.read("parameters", parameter), teacher.read(parameter)
            assert kept.dtype == given.dtype == torch.float16
            assert torch.equal(kept, given), parameter


@pytest.mark.parametrize(
    "name", ["paper-2-zero1", "tuned-2-zero3", "tuned-2-zero3-bf16", "tuned-2-zero1-dp2", "paper-2-zero1-tp2", "no-stage-1"]
)
def test_stage_2_trains_all_but_the_embeddings(name, made, teacher):
    step = 1 if name == "no-stage-1" else STEPS
    checkpoint = checkpoint_at(made(name), step)
    assert parameters_with_moments(checkpoint) == set(checkpoint.names("parameters")) - EMBEDDINGS
    for parameter in EMBEDDINGS:
        assert torch.equal(checkpoint.read("parameters", parameter), teacher.read(parameter))
    for parameter in ("blocks.0.mixer.qkv_proj.weight", "final_norm.bias", "blocks.1.mlp.up_proj.weight"):
        assert not torch.equal(checkpoint.read("parameters", parameter), teacher.read(parameter).float())


def rates_of_decay(run) -> torch.Tensor:
    checkpoints = [checkpoint_at(run, step) for step in (HALF, STEPS)]
    return torch.cat([c.read("parameters", f"blocks.{layer}.mixer.decay.rate.weight").flatten() for c in checkpoints for layer in (0, 1)])


@pytest.mark.parametrize("name", names_of(FAST_DECAYS, SLOW_DECAYS))
def test_rates_of_decay_never_fall_below_0(name, made):
    rates = rates_of_decay(made(name))
    assert rates.min() >= 0 and rates.max() > 0
    if name.startswith("paper"):  # among its many some want to fall, and stand at the bound
        assert (rates == 0).any()


def test_a_run_folder_names_what_it_came_from(inputs, made):
    stage1, stage2 = (json.loads((made(f"tuned-{stage}-zero1") / "run.json").read_text()) for stage in (1, 2))
    digest = weights_digest(inputs / TEACHER)
    assert stage1["origin"] == {"weights": digest, "teacher": str(inputs / TEACHER), "teacher_revision": None}
    assert stage2["origin"]["weights"] == digest
    assert stage2["origin"]["teacher"] == stage1["origin"]["teacher"]
    assert stage2["origin"]["stage1_steps"] == STEPS
    assert stage2["origin"]["init_from"] == str(made("tuned-1-zero1"))
    assert (stage1["stage"], stage2["stage"]) == ("stage1", "stage2")
    assert stage2["model"]["mixer"]["decay"] == "head"
