"""What a run folder lets a new start do."""

import dataclasses
import json

import pytest

from megahedge.config.options import PretrainOptions, Stage1Options, Stage2Options
from megahedge.training.run_folder import MAY_CHANGE, RunFolder
from megahedge.utils.errors import InputError, RunError
from tests.training.runs import ds_config


@pytest.fixture
def options():
    return PretrainOptions(model_config="model.json", ds_config=ds_config("zero1"))


@pytest.fixture
def folder(tmp_path, options):
    """A run that has been started with `options`."""
    run = RunFolder(tmp_path / "run")
    run.check(options)
    run.write_record("pretrain", options, {"resumed_at_step": 0})
    return run


def test_every_option_that_may_change_exists():
    commands = (PretrainOptions, Stage1Options, Stage2Options)
    assert {field.name for command in commands for field in dataclasses.fields(command)} >= MAY_CHANGE


def test_a_start_may_change_what_does_not_enter_the_mathematics(folder, options):
    folder.check(dataclasses.replace(options, resume=True))
    changed = dataclasses.replace(
        options, resume=True, tp_size=2, micro_batch_size=1, ds_config=ds_config("zero3"), save_interval=5, stop_after=9
    )
    folder.check(changed)
    with pytest.raises(InputError, match="go on with it by --resume"):
        folder.check(options)


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 1.0), ("dtype", "fp32"), ("global_batch_size", 96), ("train_tokens", 10**8), ("adam_eps", 1e-9)]
)
def test_a_start_may_not_change_the_rest(name, value, folder, options):
    with pytest.raises(InputError) as error:
        folder.check(dataclasses.replace(options, resume=True, **{name: value}))
    assert f"--{name}" in str(error.value)


def test_the_record_keeps_earlier_starts(folder, options):
    folder.write_record("pretrain", options, {"resumed_at_step": 7})
    folder.write_record("pretrain", options, {"resumed_at_step": 9})
    record = folder.read_record()
    assert record["resumed_at_step"] == 9
    assert [start["resumed_at_step"] for start in record["history"]] == [0, 7]
    assert record["options"] == json.loads(json.dumps(dataclasses.asdict(options)))


def test_a_folder_in_use_is_refused_at_once_or_after_a_time(folder):
    other = RunFolder(folder.path)
    with folder.locked():
        with pytest.raises(InputError, match="is in use by another job; wait for it to end"), other.locked():
            pass
        # status 1, which a Slurm job takes back into the queue
        with pytest.raises(RunError, match="is in use by another job; wait for it to end"), other.locked(wait_seconds=0.1):
            pass
    with other.locked(wait_seconds=0.1):
        pass


def test_a_best_checkpoint_is_compared_on_the_same_tokens_alone(folder, options):
    more = dataclasses.replace(options, resume=True, eval_tokens=5)
    folder.check(more)
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step-00000005").mkdir()
    (folder.checkpoints / "best").symlink_to("step-00000005")
    folder.check(more)
    with pytest.raises(InputError, match=r"--eval_tokens 1000000 \(now 5\)"):
        folder.check(dataclasses.replace(more, keep_best=True))


def test_checkpoints_must_be_a_folder(folder, options):
    folder.checkpoints.write_text("")
    with pytest.raises(InputError, match="checkpoints is no folder"):
        folder.check(dataclasses.replace(options, resume=True))


def test_a_history_that_is_none_does_not_end_a_run(folder, options):
    folder.record_file.write_text(json.dumps(folder.read_record() | {"history": 5}))
    folder.write_record("pretrain", options, {"resumed_at_step": 9})
    assert [start["resumed_at_step"] for start in folder.read_record()["history"]] == [0]


def test_a_damaged_record_is_the_users_error(folder, options):
    folder.record_file.write_text('{"options": ')
    with pytest.raises(InputError, match=r"run\.json cannot be read"):
        folder.check(dataclasses.replace(options, resume=True))


def test_a_start_that_was_killed_before_its_record_leaves_no_obstacle(tmp_path, options):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / ".run.json.77.tmp").write_text("{")
    folder.check(options)
    folder.write_record("pretrain", options, {})
    assert [path.name for path in folder.path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("content", ["{}", "[]", '{"options": 3}'])
def test_a_record_without_options_is_the_users_error(content, folder, options):
    folder.record_file.write_text(content)
    with pytest.raises(InputError, match=r"run\.json"):
        folder.check(dataclasses.replace(options, resume=True))


def test_a_folder_that_cannot_be_made_is_the_users_error():
    with pytest.raises(InputError, match="--output_dir=/proc/nowhere/run cannot be made"), RunFolder("/proc/nowhere/run").locked():
        pass
