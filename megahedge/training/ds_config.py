"""DeepSpeed's configuration: the user's file holds what DeepSpeed owns, the run's options supply the rest."""

import json

from megahedge.config.options import BatchPlan, TrainOptions
from megahedge.training.distributed import quiet_deepspeed
from megahedge.utils.errors import InputError
from megahedge.utils.words import either

# What our options own: path in DeepSpeed's configuration -> the option to use instead.
OWNED = {
    "train_batch_size": "--global_batch_size",
    "train_micro_batch_size_per_gpu": "--micro_batch_size",
    "gradient_accumulation_steps": "--global_batch_size and --micro_batch_size",
    "gradient_clipping": "--clip_grad",
    "optimizer": "--lr, --weight_decay and the --adam_* options",
    "scheduler": "--lr, --warmup_fraction and --min_lr_ratio",
    "bf16": "--dtype",
    "fp16": "--dtype",
    "torch_autocast": "--dtype",
    "data_types": "--dtype",
    "managed_gradient_accumulation": "the training loop",
}

# What else of DeepSpeed's configuration a file may hold; anything else would be ignored by one side or the other.
ALLOWED = {
    "zero_optimization", "communication_data_type", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "prescale_gradients",
    "gradient_predivide_factor", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger",
    "flops_profiler",
}  # fmt: skip
# Kinds that DeepSpeed does not look at before it uses the value.
_KINDS = {
    "steps_per_print": (int, "a whole number"),
    "gradient_predivide_factor": ((int, float), "a number above 0"),
    "comms_logger": (dict, "an object"),
    "flops_profiler": (dict, "an object"),
} | {
    key: (bool, "true or false")
    for key in (
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "prescale_gradients", "wall_clock_breakdown", "memory_breakdown",
        "dump_state",
    )
}  # fmt: skip
# Of the section zero_optimization, by key: what it is where it is off, and what to use.  Partitions that our checkpoints cannot reach, sums
# that are no longer those of another topology, updates at other steps than ours, and old names that DeepSpeed reads past our checks.
NOT_SUPPORTED = {
    "mics_shard_size": (-1, "stage 3 over all ranks"),
    "zero_hpz_partition_size": (1, "stage 3 over all ranks"),
    "zero_quantized_weights": (False, "communication_data_type"),
    "zero_quantized_nontrainable_weights": (False, "communication_data_type"),
    "zero_quantized_gradients": (False, "communication_data_type"),
    "zenflow": (None, "offload_optimizer"),
    "cpu_offload": (None, "offload_optimizer"),
    "cpu_offload_param": (None, "offload_param"),
    "cpu_offload_use_pin_memory": (None, "pin_memory of offload_optimizer"),
}
OFFLOAD_STAGES = {"offload_optimizer": (1, 2, 3), "offload_param": (3,)}
COMMUNICATION_DTYPES = ("fp32", "fp16", "bf16")


def load_ds_config(path: str) -> dict:
    """Read a DeepSpeed configuration file.  Raises InputError when it is not a JSON object."""
    try:
        with open(path, encoding="utf-8") as handle:
            config = json.load(handle, object_pairs_hook=_without_repetition)
    except (OSError, ValueError) as error:
        raise InputError(f"--ds_config={path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"--ds_config={path} holds a {type(config).__name__}; a JSON object is needed")
    return config


def _without_repetition(pairs: list[tuple[str, object]]) -> dict:
    """A JSON object.  Raises ValueError for a key that is there twice, of which Python would take the last."""
    names = [name for name, _ in pairs]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"{repeated!r} is there twice")
    return dict(pairs)


def zero_stage(config: dict) -> int:
    """ZeRO stage that a DeepSpeed configuration asks for; 0 where it says nothing.  Raises InputError for what is no stage."""
    section = config.get("zero_optimization", {})
    if not isinstance(section, dict):
        raise InputError(f'zero_optimization in --ds_config is {json.dumps(section)}; say {{"stage": N}}, and use 0, 1, 2 or 3')
    stage = section.get("stage", 0)
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise InputError(f"zero_optimization in --ds_config asks for stage {json.dumps(stage)}; use 0, 1, 2 or 3")
    return stage


def merge_ds_config(config: dict, options: TrainOptions, plan: BatchPlan) -> dict:
    """The user's configuration completed with what our options own.

    A value of ours that the file sets as well is accepted if it is "auto" or the same, else InputError names our option.
    """
    stage = zero_stage(config)
    _refuse_unsupported(config, options.ds_config)
    ours = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation_steps,
        "gradient_clipping": options.clip_grad,
        "managed_gradient_accumulation": True,
    } | _precision(options.dtype, stage)
    for key, option in OWNED.items():
        if key in config and not _agrees(config[key], ours.get(key)):
            wanted = f"here {json.dumps(ours[key])}" if key in ours else "not to be set in the file"
            there = f"{options.ds_config}: {key}={json.dumps(config[key])}"
            raise InputError(f"{there} belongs to {option} ({wanted}); remove it or say 'auto'")
    rest = {key: value for key, value in config.items() if key not in OWNED}
    return _defaults(options.dtype) | rest | ours


def _precision(dtype: str, stage: int) -> dict:
    """Settings that keep masters, moments and gradient sums in fp32 whatever `dtype` computes in."""
    if dtype == "fp32":
        return {}
    if stage == 0:
        # DeepSpeed refuses bf16 parameters with fp32 gradient sums at stage 0; autocast over fp32 parameters gives both.
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    return {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def _defaults(dtype: str) -> dict:
    """What a user's file may change.  DeepSpeed would sum bf16 gradients over the ranks in bf16: half the traffic, and less exact."""
    communication = {"communication_data_type": "fp32"} if dtype == "bf16" else {}
    # Our optimizer is a client optimizer that DeepSpeed has no list entry for, and it is a torch one also under offload.
    return {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**12} | communication


def _refuse_unsupported(config: dict, path: str) -> None:
    """Refuse what DeepSpeed would refuse or ignore later, and features whose partitions our checkpoints cannot reach."""
    zero = config.get("zero_optimization", {})
    unknown = [key for key in config if key not in ALLOWED and key not in OWNED and not _switched_off(config[key])]
    if "activation_checkpointing" in unknown:
        raise InputError(f"{path}: activation_checkpointing belongs to the option --activation_checkpointing; remove it")
    if unknown:
        raise InputError(f"{path}: {', '.join(unknown)} is not supported; remove it, and keep to {', '.join(sorted(ALLOWED))}")
    for key, (kind, words) in _KINDS.items():
        value = config.get(key, "auto")
        if value == "auto":
            continue
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or (key.endswith("factor") and not value > 0):
            raise InputError(f"{path}: {key}={json.dumps(value)} is not {words}")
    communication = config.get("communication_data_type")
    if communication is not None and communication not in COMMUNICATION_DTYPES:
        named = json.dumps(communication)
        raise InputError(f"{path}: communication_data_type={named} is not known; use {', '.join(COMMUNICATION_DTYPES)} or leave it out")
    for key, (off, instead) in NOT_SUPPORTED.items():
        if zero.get(key, off) != off:
            raise InputError(f"{path}: {key}={json.dumps(zero[key])} is not supported; remove it, and use {instead}")
    for key, stages in OFFLOAD_STAGES.items():
        device = zero[key].get("device", "none") if isinstance(zero.get(key), dict) else "none"
        if device == "nvme":
            raise InputError(f"{path}: {key} to nvme is not supported; use device cpu, or no offload")
        if device != "none" and zero_stage(config) not in stages:
            reason = f"DeepSpeed ignores it at stage {zero_stage(config)}; use stage {either(stages)}, or remove it"
            raise InputError(f"{path}: {key} to {device} does nothing: {reason}")
    _check_zero_section(zero, path)


def _switched_off(section) -> bool:
    return isinstance(section, dict) and section.get("enabled") is False


def _check_zero_section(section: dict, path: str) -> None:
    """Let DeepSpeed's own model of the section judge its keys and values."""
    quiet_deepspeed()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**{key: value for key, value in section.items() if value != "auto"})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["zero_optimization", *map(str, first["loc"])])
        raise InputError(f"{path}: {where}={json.dumps(first['input'], default=str)}: {first['msg']}") from None


def _agrees(theirs, ours) -> bool:
    if theirs == "auto":
        return True
    if isinstance(theirs, dict) and (theirs.get("enabled") == "auto" or (theirs.get("enabled") is False and ours is None)):
        return True
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return all(key in ours and _agrees(value, ours[key]) for key, value in theirs.items())
    return ours is not None and theirs == ours
