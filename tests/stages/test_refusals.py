"""Bad input to either stage: one line that says what is wrong, status 2, nothing written."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from megahedge.config.options import Stage1Options, Stage2Options
from megahedge.data.indexed_writer import IndexedDatasetWriter
from megahedge.stages.stage1 import plan_stage1
from megahedge.stages.stage2 import plan_stage2
from megahedge.utils.errors import InputError
from tests.stages.runs import HALF, STEPS, TEACHER
from tests.training.processes import STAGE1, STAGE2, start


@pytest.fixture
def refused(options, tmp_path):
    """A function that plans a run and returns the line that refuses it."""

    def check(stage: int, *arguments, **changes) -> str:
        options_type, plan = {1: (Stage1Options, plan_stage1), 2: (Stage2Options, plan_stage2)}[stage]
        with pytest.raises(InputError) as caught:
            plan(options_type(**options(stage, *arguments, **changes)))
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()
        return str(caught.value)

    return check


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"init_from": "pretrained"}, ["--init_from=", "names no teacher", "scripts/stage1.py"]),
        ({"init_from": "pretrained", "teacher": TEACHER}, ["--init_from=", "a checkpoint of pretrain; stage 2 starts from one of stage 1"]),
        ({"init_from": "tuned-2-zero1"}, ["--init_from=", "a checkpoint of stage2"]),
        ({"init_from": "tokenizer"}, ["--init_from=", "no complete checkpoint"]),
        ({"init_from": "nowhere"}, ["--init_from=", "nowhere", "no complete checkpoint"]),
        ({"init_from": None}, ["--init_from=None with --stage1_steps=None", "--stage1_steps 0"]),
        ({"stage1_steps": 0}, ["--init_from=", "--stage1_steps=0"]),
        ({"init_from": None, "stage1_steps": 0}, ["needs a --teacher"]),
        ({"stage1_steps": HALF}, [f"has {STEPS} steps of stage 1 behind it, not --stage1_steps={HALF}"]),
        ({"stage1_steps": -1}, ["--stage1_steps=-1"]),
        ({"mixer": "softmax"}, ["--mixer=softmax is not known; use hedge_mamba or mamba"]),
        ({"mixer": "mamba"}, ["--mixer=mamba", "takes over nothing that --init_from=", "--stage1_steps 0"]),
        ({"teacher": "nowhere"}, ["nowhere", "no local folder"]),
        ({"rope": "after"}, ["another feature map: --rope=after (stage 1: before)"]),
        ({"normalizer_eps": 1e-4}, ["--normalizer_eps=0.0001 (stage 1: 1e-06)"]),
        ({"teacher_revision": "main"}, ["--teacher_revision=main"]),
        ({"decay": "none", "decay_step": "garbage"}, ["--decay_step=garbage is not known", "auto, channel, head or state"]),
        ({"decay_step": "channel"}, ["decay_step='channel'", "decay=head"]),
        ({"kd_alpha": 1.5}, ["--kd_alpha=1.5"]),
        ({"tp_size": 3}, ["--tp_size=3", "1 or 2"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_starts_of_stage_2_are_refused(changes, said, refused):
    line = refused(2, **changes)
    assert all(words in line for words in said), line


def test_a_stage_1_of_another_recipe_is_refused(refused):
    line = refused(2, "paper")
    assert "--feature_map_per_head=False (stage 1: True), --rope=after (stage 1: before); use stage 1's --recipe and options" in line


@pytest.fixture
def other_teacher(inputs, made, tmp_path):
    """A function that copies the teacher with other words in its config.json."""
    made("tuned-1-zero1")

    def copy(**words) -> str:
        folder = Path(shutil.copytree(inputs / TEACHER, tmp_path / "teacher"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | words))
        return str(folder)

    return copy


def test_a_teacher_of_another_shape_is_refused(refused, other_teacher):
    assert "another family or shape" in refused(2, teacher=other_teacher(num_hidden_layers=1))


def test_a_teacher_that_has_gone_is_asked_for(inputs, made, refused, tmp_path):
    """The run of stage 1 names a folder that is no longer there."""
    run = shutil.copytree(made("tuned-1-zero1"), tmp_path / "stage1")
    for manifest in run.glob("checkpoints/*/checkpoint.json"):
        manifest.write_text(manifest.read_text().replace(str(inputs / TEACHER), str(tmp_path / "gone")))
    line = refused(2, init_from=str(run))
    assert "the teacher of --init_from" in line and "give --teacher" in line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"teacher": "nowhere"}, ["nowhere", "no local folder"]),
        ({"teacher": "tokenizer"}, ["config.json"]),
        ({"teacher": TEACHER, "teacher_revision": "main"}, ["revision=main"]),
        ({"match_loss": "l1"}, ["--match_loss=l1"]),
        ({"seq_len": 128}, ["--seq_len=128", "max_position_embeddings=64"]),
        ({"data_path": ("nowhere/text",)}, ["nowhere/text"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_starts_of_stage_1_are_refused(changes, said, refused):
    line = refused(1, **changes)
    assert all(words in line for words in said), line


def test_a_teacher_whose_vocabulary_is_smaller_than_its_tokenizer_is_refused(refused, other_teacher):
    assert "token ids up to 96; the model has vocab_size=50" in refused(1, teacher=other_teacher(vocab_size=50))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("other-teacher-start", "InputError: .* has learnt from a teacher whose weights have digest"),
        ("broken-teacher-no-stage-1", "RunError: .* gives logits that are not finite: its weights hold NaN or infinity"),
        ("damaged-start", "InputError: .*parameters-00000.safetensors does not have the digest that was written"),
    ],
)
def test_files_that_do_not_fit_are_refused_before_a_step(name, said, made):
    run = made(name)
    assert re.match(said, made.outcomes[name].error)
    assert [path.name for path in run.iterdir()] == [".lock"]


def test_stage_1_measures_its_teacher_before_the_first_step(made):
    run = made("broken-teacher-stage-1")
    said = "RunError: the validation loss is nan before the first step: the weights that the run starts from hold NaN"
    assert made.outcomes["broken-teacher-stage-1"].error.startswith(said)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {(row["kind"], row["step"]) for row in rows} == {("eval", 0)} and not (run / "checkpoints").exists()


def test_the_commands_end_with_their_status_and_one_line(options, inputs, made, tmp_path):
    """2 for what a user can mend, 1 for a hand-over that is not exact."""
    made("mutant-probe")
    cases = [
        (STAGE1, options(1, teacher="/nowhere/teacher"), 2, "'/nowhere/teacher'"),
        (STAGE2, options(2, init_from="nowhere"), 2, "no complete checkpoint"),
        (STAGE2, options(2, init_from="other-probe"), 1, "the hand-over is not exact"),
    ]
    for script, values, expected, said in cases:
        status, stderr = start(values, tmp_path / "process", script=script).finish()
        assert status == expected, stderr
        last = stderr.splitlines()[-1]
        assert last.startswith("error: ") and said in last and "Traceback" not in stderr


def test_documents_are_kept_apart_only_where_the_index_tells_them_apart(refused, inputs, tmp_path):
    for path in inputs.glob("data*"):
        shutil.copy(path, tmp_path)
    with IndexedDatasetWriter(tmp_path / "data_train", np.uint16) as writer:
        for _ in range(20):
            writer.add_document(np.ones(33, np.uint16))
        writer.finish()
    line = refused(1, data_path=(str(tmp_path / "data"),), reset_at_documents=True)
    assert "--reset_at_documents" in line and "the 20 documents of" in line and "all have 33 tokens" in line
