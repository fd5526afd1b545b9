"""A run of either stage that was interrupted ends, bit for bit, as one that was not."""

import json
import shutil
from pathlib import Path

import pytest

from megahedge.config.options import Stage2Options
from megahedge.stages.stage2 import plan_stage2
from tests.stages.conftest import FAST_RESUMED, SLOW_RESUMED, names_of
from tests.stages.runs import HALF, STEPS, TEACHER
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


def test_a_run_of_a_version_before_this_one_goes_on(made):
    """What its record does not name had its default."""
    made("older-version")
    assert made.outcomes["older-version"].error is None
    assert_same_end(made("older-version"), made("tuned-2-zero1"), STEPS)


@pytest.mark.parametrize(
    ("name", "unbroken"), [("other-teacher-resumed", "tuned-2-zero1"), ("other-teacher-stage-1-resumed", "tuned-1-zero1")]
)
def test_a_run_is_not_resumed_with_another_teacher(name, unbroken, made):
    run = made(name)
    assert made.outcomes[name].error.startswith("InputError: ")
    assert not (run / "checkpoints" / f"step-{STEPS:08d}").exists()
    assert differing(checkpoint_at(run, HALF), checkpoint_at(made(unbroken), HALF)) == []


@pytest.mark.parametrize("start", ["tuned-1-zero1", "tuned-2-zero1"])
def test_a_relative_teacher_is_found_from_another_folder(start, inputs, made, options, tmp_path, monkeypatch):
    """The run was started two folders above itself with `teachers/small`; stage 2 starts from it, or it goes on, somewhere else."""
    run = Path(shutil.copytree(made(start), tmp_path / "project" / "runs" / "mine"))
    teacher = shutil.copytree(inputs / TEACHER, tmp_path / "project" / "teachers" / "small")
    for manifest in run.glob("checkpoints/*/checkpoint.json"):
        manifest.write_text(manifest.read_text().replace(str(inputs / TEACHER), "teachers/small"))
    monkeypatch.chdir(tmp_path)
    changes = {"init_from": str(run)} if start == "tuned-1-zero1" else {"init_from": "gone", "resume": True, "output_dir": str(run)}
    plan = plan_stage2(Stage2Options(**options(2, **changes)))
    assert Path(plan.weights).resolve() == Path(teacher).resolve()
