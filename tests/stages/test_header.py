"""What a run says of itself before it starts: every learning rate, and whose parameters are whose."""

import logging
import shutil
from types import SimpleNamespace

import pytest
import torch

from megahedge.config.options import Stage2Options
from megahedge.parallel.topology import TensorParallel
from megahedge.stages import base
from megahedge.stages.stage2 import Stage2
from megahedge.training.checkpointing import checkpoint_bytes
from megahedge.training.run_folder import RunFolder
from tests.models.small import small_config


def stage2(**changes) -> tuple[Stage2, Stage2Options]:
    """A stage 2 of a small model, without memory for its parameters."""
    options = Stage2Options(stage1_steps=0, teacher="teacher", lr=2e-3, min_lr_ratio=0.1, **changes)
    with torch.device("meta"):
        return Stage2(small_config().with_mixer(options.mixer_config("hedge_mamba")), TensorParallel(None, 0, 1), options), options


def test_each_learning_rate_is_named():
    for changes, said in (({}, "peak 0.002, cosine to 0.0002"), ({"lr_new": 1e-2}, "peak 0.002 and 0.01, cosine to 0.0002 and 0.001")):
        stage, options = stage2(**changes)
        assert base._describe_rates(options, stage) == said


def test_parameters_of_the_teacher_are_not_counted_as_frozen_ones_of_the_student(caplog):
    caplog.set_level(logging.INFO)
    counts = {}
    for alpha in (0.0, 0.7):
        stage, _ = stage2(kd_alpha=alpha)
        caplog.clear()
        base._print_parameters(stage, each_trainable=False)
        counts[alpha] = caplog.messages[0].removeprefix("parameters").strip().split(", ")
    frozen = sum(parameter.numel() for parameter in (stage.student.embedding.weight, stage.student.lm_head.weight))
    teacher = sum(parameter.numel() for parameter in stage.teacher.parameters()) - frozen
    assert counts[0.7][:2] == counts[0.0] and f"frozen ({frozen})" in counts[0.0][1]
    assert len(counts[0.0]) == 2 and f"of the teacher ({teacher})" in counts[0.7][2]


@pytest.mark.parametrize(
    ("keep_best", "there", "free", "warned"), [(False, 0, 3, None), (False, 0, 2, 3), (True, 0, 3, 4), (True, 2, 2, None)]
)
def test_a_disk_without_room_for_the_checkpoints_to_come_is_warned_of(keep_best, there, free, warned, tmp_path, monkeypatch, caplog):
    """Two are kept, and one more is written before an old one goes; `free` counts checkpoints."""
    stage, options = stage2(keep_best=keep_best)
    run = RunFolder(tmp_path / "run")
    for step in range(there):
        (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    run.path.mkdir(exist_ok=True)
    size = checkpoint_bytes(stage.student)
    trained, frozen = (sum(p.numel() for p in stage.student.parameters() if p.requires_grad == wanted) for wanted in (True, False))
    assert size == 12 * trained + 4 * frozen
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free * size))
    base._check_room(SimpleNamespace(options=options, run=run), stage)
    said = f"--keep_last=2{' with --keep_best' if keep_best else ''} needs room for {warned} more"
    assert [said in message for message in caplog.messages] == ([True] if warned else [])
