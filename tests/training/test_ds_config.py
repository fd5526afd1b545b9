"""The user's DeepSpeed file and our options, merged."""

import json
import re

import pytest

from megahedge.config.options import BatchPlan, TrainOptions
from megahedge.training.ds_config import load_ds_config, merge_ds_config, zero_stage
from megahedge.utils.errors import InputError
from tests.training.runs import REPOSITORY, ds_config

PLAN = BatchPlan(global_batch_size=48, micro_batch_size=4, dp_size=2)
OPTIONS = TrainOptions(ds_config=ds_config("zero1"), dtype="bf16", clip_grad=1.0)
FP32 = TrainOptions(ds_config=ds_config("zero1"), dtype="fp32", clip_grad=1.0)


def merge(config, options=OPTIONS):
    return merge_ds_config({"zero_optimization": {"stage": 2}} | config, options, PLAN)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_the_carried_files_hold_only_what_deepspeed_owns(path):
    config = load_ds_config(str(path))
    assert set(config) == {"zero_optimization"}
    assert zero_stage(config) == int(path.stem[4])
    merge(config)


def test_options_supply_batches_clipping_and_precision():
    merged = merge({"zero_optimization": {"stage": 3, "overlap_comm": False}, "wall_clock_breakdown": True})
    expected = {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 6,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 3, "overlap_comm": False},
        "wall_clock_breakdown": True,
    }
    assert expected.items() <= merged.items()
    assert "fp16" not in merged


def test_fp32_asks_for_no_precision_and_stage_0_for_autocast():
    assert not {"bf16", "fp16", "torch_autocast"} & merge({}, FP32).keys()
    stage_0 = merge({"zero_optimization": {"stage": 0}})
    assert stage_0["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert "bf16" not in stage_0


ACCEPTED = [
    {"train_batch_size": 48},
    {"train_batch_size": "auto", "gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": 4},
    {"gradient_clipping": 1},
    {"optimizer": "auto", "scheduler": "auto"},
    {"bf16": {"enabled": True}},
    {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0}},
    {"fp16": {"enabled": False, "loss_scale": 0}},
    {"data_types": {"grad_accum_dtype": "fp32"}},
]


@pytest.mark.parametrize("config", ACCEPTED, ids=json.dumps)
def test_auto_and_equal_values_are_accepted(config):
    assert merge(config) == merge({})


REFUSED = [
    ({"train_batch_size": 64}, "--global_batch_size"),
    ({"train_micro_batch_size_per_gpu": 2}, "--micro_batch_size"),
    ({"gradient_accumulation_steps": 1}, "--global_batch_size and --micro_batch_size"),
    ({"gradient_clipping": 0.5}, "--clip_grad"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, "--lr, --weight_decay"),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, "--warmup_fraction"),
    ({"bf16": {"enabled": False}}, "--dtype"),
    ({"bf16": {"enabled": True, "immediate_grad_update": True}}, "--dtype"),
    ({"fp16": {"enabled": True}}, "--dtype"),
    ({"torch_autocast": {"enabled": True}}, "--dtype"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "--dtype"),
    ({"managed_gradient_accumulation": False}, "the training loop"),
]


@pytest.mark.parametrize(("config", "option"), REFUSED, ids=lambda value: json.dumps(value) if isinstance(value, dict) else "")
def test_other_values_are_refused_naming_our_option(config, option):
    with pytest.raises(InputError) as error:
        merge(config)
    assert option in str(error.value)
    assert next(iter(config)) in str(error.value)
    assert OPTIONS.ds_config in str(error.value)


UNSUPPORTED = [
    ({"mics_shard_size": 2}, "mics_shard_size=2"),
    ({"mics_shard_size": "auto"}, 'mics_shard_size="auto"'),
    ({"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}, "offload_optimizer to nvme"),
    ({"offload_param": {"device": "nvme"}}, "offload_param to nvme"),
    ({"zero_hpz_partition_size": 2}, "zero_hpz_partition_size=2"),
    ({"zero_quantized_weights": True}, "zero_quantized_weights=true"),
    ({"zero_quantized_gradients": True}, "zero_quantized_gradients=true is not supported; remove it, and use communication_data_type"),
    ({"zenflow": {"topk_ratio": 0.1}}, "zenflow="),
    ({"cpu_offload": True}, "cpu_offload=true is not supported; remove it, and use offload_optimizer"),
    ({"cpu_offload_param": True}, "cpu_offload_param=true"),
]


@pytest.mark.parametrize(("section", "said"), UNSUPPORTED, ids=lambda value: json.dumps(value) if isinstance(value, dict) else "")
def test_partitions_that_checkpoints_cannot_reach_are_refused(section, said):
    with pytest.raises(InputError, match=r"remove it|use device cpu") as error:
        merge({"zero_optimization": {"stage": 3} | section})
    assert said in str(error.value) and OPTIONS.ds_config in str(error.value)


@pytest.mark.parametrize("section", [{"offload_optimizer": None}, {"offload_param": {"device": "cpu"}}])
def test_their_harmless_values_are_accepted(section):
    zero = {"stage": 3} | section
    assert merge({"zero_optimization": zero})["zero_optimization"] == zero


def test_bf16_gradients_are_summed_over_ranks_in_fp32_unless_the_file_says_otherwise():
    for stage in (0, 1, 2, 3):
        assert merge({"zero_optimization": {"stage": stage}})["communication_data_type"] == "fp32"
    assert merge({"communication_data_type": "bf16"})["communication_data_type"] == "bf16"
    assert "communication_data_type" not in merge({}, FP32)
    assert merge({"communication_data_type": "bf16"}, FP32)["communication_data_type"] == "bf16"


@pytest.mark.parametrize("section", [{"stage": 4}, {"stage": "auto"}, {"stage": None}, "3", 3, [3], None])
def test_a_stage_that_is_none_is_refused(section):
    for read in (zero_stage, merge):
        with pytest.raises(InputError, match="use 0, 1, 2 or 3"):
            read({"zero_optimization": section})


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b""])
def test_a_file_that_is_no_json_object_is_refused(content, tmp_path):
    path = tmp_path / "ds.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"ds\.json"):
        load_ds_config(str(path))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimization": {"stage": 1, "foo": 2}}, "zero_optimization.foo=2"),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": "abc"}}, 'zero_optimization.reduce_bucket_size="abc"'),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": -5}}, "zero_optimization.reduce_bucket_size=-5"),
        ({"zero_optimization": {"stage": True}}, "stage true; use 0, 1, 2 or 3"),
        ({"communication_data_type": "foo"}, 'communication_data_type="foo" is not known; use fp32'),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning is not supported"),
        ({"zero_optimisation": {"stage": 1}}, "zero_optimisation is not supported; remove it, and keep to"),
        ({"activation_checkpointing": {"partition_activations": True}}, "belongs to the option --activation_checkpointing"),
    ],
)
def test_what_deepspeed_would_refuse_or_ignore_is_refused_at_the_plan(config, said):
    with pytest.raises(InputError, match=re.escape(said)):
        merge(config)


def test_a_feature_that_is_switched_off_is_no_reason_to_refuse():
    merge({"tensorboard": {"enabled": False}, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}})


@pytest.mark.parametrize(
    ("stage", "key", "nearest"), [(0, "offload_optimizer", "1, 2 or 3"), (0, "offload_param", "3"), (1, "offload_param", "3")]
)
def test_offload_that_deepspeed_would_ignore_is_refused_with_the_stages_that_have_it(stage, key, nearest):
    with pytest.raises(InputError, match=f"{key} to cpu does nothing: .* stage {stage}; use stage {nearest}, or remove it"):
        merge({"zero_optimization": {"stage": stage, key: {"device": "cpu"}}})
    merge({"zero_optimization": {"stage": stage, key: {"device": "none"}}})
    merge({"zero_optimization": {"stage": 3, key: {"device": "cpu"}}})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("comms_logger", 5, "an object"),
        ("flops_profiler", "on", "an object"),
        ("steps_per_print", "x", "a whole number"),
        ("steps_per_print", True, "a whole number"),
        ("prescale_gradients", "no", "true or false"),
        ("wall_clock_breakdown", 1, "true or false"),
        ("gradient_predivide_factor", 0, "a number above 0"),
    ],
)
def test_values_of_a_wrong_kind_are_refused_before_the_run(key, value, words):
    with pytest.raises(InputError, match=f"{key}={re.escape(json.dumps(value))} is not {words}"):
        merge({key: value})
    merge({key: "auto"})


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "twice.json"
    path.write_text('{"zero_optimization": {"stage": 1}, "zero_optimization": {"stage": 3}}')
    with pytest.raises(InputError, match="cannot be read as JSON: 'zero_optimization' is there twice"):
        load_ds_config(str(path))
