"""Options are checked when they are made, and each message says which option, what it was, what would do."""

import dataclasses
import json

import pytest

from megahedge.config import options as options_module
from megahedge.config.model import ModelConfig
from megahedge.config.options import DataOptions, OptimOptions, PretrainOptions, RunOptions, TrainOptions, plan_batches
from megahedge.utils.cli import field_docs
from megahedge.utils.errors import InputError
from tests.training.runs import ds_config

REQUIRED = {"model_config": "m.json", "ds_config": ds_config("zero1")}
BAD = [
    ("train_tokens", 0),
    ("train_tokens", -5),
    ("train_tokens", 1024 * 48 - 1),
    ("seq_len", 0),
    ("global_batch_size", 0),
    ("global_batch_size", -1),
    ("eval_tokens", 0),
    ("micro_batch_size", 0),
    ("micro_batch_size", "all"),
    ("lr", 0.0),
    ("lr", -1e-3),
    ("lr", float("nan")),
    ("lr", float("inf")),
    ("min_lr_ratio", 1.5),
    ("warmup_fraction", -0.1),
    ("adam_beta1", 1.0),
    ("adam_beta2", -0.1),
    ("adam_eps", -1.0),
    ("weight_decay", -0.1),
    ("weight_decay", float("nan")),
    ("weight_decay", float("inf")),
    ("clip_grad", -1.0),
    ("dtype", "fp16"),
    ("tp_size", 0),
    ("log_interval", 0),
    ("eval_interval", 0),
    ("save_interval", 0),
    ("keep_last", 0),
    ("stop_after", 0),
    ("seed", -1),
    ("seed", 2**31),
    ("ds_config", "nowhere.json"),
    ("export_dtype", "int8"),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_bad_value_is_refused_naming_option_and_value(name, value):
    with pytest.raises(InputError) as error:
        PretrainOptions(**(REQUIRED | {name: value}))
    assert f"--{name}={value}" in str(error.value)


def test_the_defaults_are_the_papers():
    options = TrainOptions(ds_config=ds_config("zero1"))
    assert (options.train_tokens, options.seq_len, options.global_batch_size) == (10**9, 1024, 48)
    assert (options.lr, options.min_lr_ratio, options.weight_decay, options.clip_grad) == (1e-2, 0.1, 0.1, 1.0)
    assert (options.adam_beta1, options.adam_beta2) == (0.9, 0.95)
    assert options.train_steps == 10**9 // (1024 * 48)


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainOptions(ds_config=ds_config("zero1")).lr = 1.0


@pytest.mark.parametrize("group", [value for value in vars(options_module).values() if dataclasses.is_dataclass(value)])
def test_every_option_has_a_help_text(group):
    if group.__name__ != "BatchPlan":
        assert {field.name for field in dataclasses.fields(group)} <= set(field_docs(group))


def test_an_option_lives_in_one_group():
    names = [field.name for group in (DataOptions, OptimOptions, RunOptions) for field in dataclasses.fields(group)]
    assert len(names) == len(set(names))
    assert set(names) == {field.name for field in dataclasses.fields(TrainOptions)}


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "dp_size", "micro", "accumulation"),
    [
        (48, "auto", 1, 4, 12),
        (48, "auto", 8, 3, 2),
        (48, "auto", 16, 3, 1),
        (48, "auto", 48, 1, 1),
        (10, "auto", 1, 2, 5),
        (7, "auto", 1, 1, 7),
        (8, 8, 1, 8, 1),
        (8, 2, 2, 2, 2),
        (8, 1, 8, 1, 1),
    ],
)
def test_batches_are_cut_for_the_ranks(global_batch_size, micro_batch_size, dp_size, micro, accumulation):
    plan = plan_batches(DataOptions(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size), dp_size)
    assert (plan.micro_batch_size, plan.accumulation_steps) == (micro, accumulation)
    assert plan.micro_batch_size * plan.accumulation_steps * dp_size == global_batch_size


@pytest.mark.parametrize(
    ("changes", "dp_size", "words"),
    [
        ({"global_batch_size": 12}, 5, ["dp_size=5", "--global_batch_size=12", "1, 2, 3, 4, 6 or 12"]),
        ({"global_batch_size": 12, "micro_batch_size": 5}, 1, ["--micro_batch_size=5", "1, 2, 3, 4, 6 or 12"]),
        ({"global_batch_size": 12, "micro_batch_size": 4}, 2, ["--micro_batch_size=4", "= 6", "1, 2, 3 or 6"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused_naming_those_that_do(changes, dp_size, words):
    with pytest.raises(InputError) as error:
        plan_batches(DataOptions(**changes), dp_size)
    assert all(word in str(error.value) for word in words)


MODEL = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 0),
        ("hidden_size", -32),
        ("num_layers", 1.5),
        ("num_heads", 3),
        ("activation", "tanh"),
        ("rotary_pct", 1.1),
        ("rotary_pct", 0.2),  # rotates 3 of 16 features
    ],
)
def test_a_bad_model_config_is_refused_naming_field_and_value(name, value):
    with pytest.raises(InputError) as error:
        ModelConfig(**(MODEL | {name: value}))
    assert f"{name}={value!r}" in str(error.value)


def test_a_model_config_survives_json():
    config = ModelConfig(**MODEL)
    assert ModelConfig.from_record(json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert (config.head_dim, config.rotary_dim) == (16, 4)
    assert config.residual_std == 0.01
