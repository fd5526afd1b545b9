"""A run of either stage that was interrupted ends, bit for bit, as one that was not."""

import json

import pytest

from tests.stages.conftest import FAST_RESUMED, SLOW_RESUMED, names_of
from tests.stages.runs import HALF, STEPS
from tests.training.runs import assert_same_end, checkpoint_at, differing


@pytest.mark.parametrize("name", names_of(FAST_RESUMED, SLOW_RESUMED))
def test_runs_resume_exactly(name, made):
    assert json.loads((made(f"{name}-resumed") / "run.json").read_text())["resumed_at_step"] == HALF
    assert_same_end(made(f"{name}-resumed"), made(name), STEPS)


def test_a_run_resumes_exactly_when_teacher_and_stage_1_have_moved(made):
    assert_same_end(made("moved-on"), made("tuned-2-zero1"), STEPS)
    assert json.loads((made("moved-on") / "run.json").read_text())["options"]["teacher"].endswith("moved/teacher")


def test_a_run_goes_on_without_the_folder_of_stage_1(made):
    """Its own checkpoints hold everything; what stage 1 has become does not matter either."""
    assert made.outcomes["tuned-2-zero1"].error is None
    assert_same_end(made("stage-1-gone"), made("tuned-2-zero1"), STEPS)
    origin, before = (json.loads((made(name) / "run.json").read_text())["origin"] for name in ("stage-1-gone", "tuned-2-zero1"))
    assert origin == before


@pytest.mark.parametrize(
    ("name", "unbroken"), [("other-teacher-resumed", "tuned-2-zero1"), ("other-teacher-stage-1-resumed", "tuned-1-zero1")]
)
def test_a_run_is_not_resumed_with_another_teacher(name, unbroken, made):
    run = made(name)
    assert made.outcomes[name].error.startswith("InputError: ")
    assert not (run / "checkpoints" / f"step-{STEPS:08d}").exists()
    assert differing(checkpoint_at(run, HALF), checkpoint_at(made(unbroken), HALF)) == []
