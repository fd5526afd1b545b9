"""A run on paper: memory of each GPU, whether it fits or what to change, steps and days; neither weights, data nor a GPU is needed."""

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch

from megahedge.config.model import ModelConfig
from megahedge.config.options import BatchPlan, Stage1Options, Stage2Options, TrainOptions, plan_batches
from megahedge.config.published import PYTHIA, Gpu, find_gpu, pythia_config
from megahedge.models.families import family_of
from megahedge.models.hf_weights import load_config, load_config_file
from megahedge.stages.base import Stage
from megahedge.stages.memory import PHASES, Memory, Parameters, Zero, plan_memory
from megahedge.stages.stage1 import Stage1
from megahedge.stages.stage2 import Stage2
from megahedge.stages.step_cost import StepCost, build_on_meta, step_cost
from megahedge.training.ds_config import load_ds_config, merge_ds_config
from megahedge.utils.errors import InputError
from megahedge.utils.units import format_count
from megahedge.utils.words import divisors, either

GIB = 1 << 30
RESERVED_GIB = 1.5
"""Of each GPU for CUDA's context, NCCL and cuBLAS; assumed."""
RESERVED_BYTES = int(RESERVED_GIB * GIB)
SECONDS_PER_OPERATION = 5e-6
"""Of a torch operation that is launched from Python and does next to nothing; assumed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """tools/plan.py beside the options of the stage."""

    stage: int = 2
    """Stage to plan, 1 or 2; --help shows the options of the one that is named."""
    gpu: str = "A100-80G"
    """Kind of GPU, one of megahedge/config/published.py: A10, A100-40G, A100-80G, H100-80G, H200, L40S or RTX4090."""
    num_gpus: int = 8
    """GPUs in all; dp_size is num_gpus / tp_size."""
    utilisation: float = 0.3
    """Share of the GPU's peak that matrix products reach; assumed, since it depends on machine, sizes and network."""
    json: bool = False
    """Print the plan as JSON."""

    def __post_init__(self):
        find_gpu(self.gpu)
        if self.num_gpus < 1:
            raise InputError(f"--num_gpus={self.num_gpus} must be at least 1")
        if not 0 < self.utilisation <= 1:
            raise InputError(f"--utilisation={self.utilisation} must be above 0 and at most 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanStage1Options(ClusterOptions, Stage1Options):
    """tools/plan.py --stage 1"""

    stage_type: ClassVar[type[Stage]] = Stage1
    stage: int = 1
    """Stage to plan, 1 or 2; --help shows the options of the one that is named."""

    def __post_init__(self):
        ClusterOptions.__post_init__(self)
        Stage1Options.__post_init__(self)

    def student_of(self, teacher: ModelConfig) -> ModelConfig:
        """What the stage trains."""
        return teacher.with_mixer(self.mixer_config("hedgehog"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanStage2Options(ClusterOptions, Stage2Options):
    """tools/plan.py --stage 2"""

    stage_type: ClassVar[type[Stage]] = Stage2
    teacher: str = "EleutherAI/pythia-1b"
    """Folder with a config.json, config file, or name of a Pythia model."""
    stage1_steps: int | None = 0
    """Of no weight in a plan."""

    def __post_init__(self):
        ClusterOptions.__post_init__(self)
        Stage2Options.__post_init__(self)

    def student_of(self, teacher: ModelConfig) -> ModelConfig:
        """What the stage trains."""
        return teacher.with_mixer(self.mixer_config(self.mixer))


PLANS = {1: PlanStage1Options, 2: PlanStage2Options}
"""Options by stage."""
PlanOptions = PlanStage1Options | PlanStage2Options


def teacher_config(name: str) -> ModelConfig:
    """The config of a model's folder, of a config file, or of a published Pythia.  Raises InputError where there is none."""
    if not name.strip():
        raise InputError("--teacher is empty; give a folder, a config file or pythia-SIZE")
    path = Path(os.path.expanduser(name))  # unlike Path.expanduser, leaves the names of unknown users as they are
    if path.is_dir():
        return load_config(path)
    if path.is_file():
        return load_config_file(path)
    published = pythia_config(name)
    if published is None:
        raise InputError(
            f"--teacher={name} is no folder with a config.json, no config file and no known size of Pythia; "
            f"use pythia-{either(PYTHIA)}, or a folder"
        )
    return family_of(published).model_config(published)


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """All that is said of one set of options."""

    options: PlanOptions
    gpu: Gpu
    parameters: Parameters
    """Of one rank, before ZeRO divides them."""
    zero: Zero
    batches: BatchPlan
    memory: Memory
    cost: StepCost

    @property
    def room(self) -> int:
        """Bytes of a GPU that a run may take."""
        return int((self.gpu.memory_gib - RESERVED_GIB) * GIB)

    @property
    def fits(self) -> bool:
        """Whether the run's largest moment finds room."""
        return self.memory.peak <= self.room

    @property
    def peak_tflops(self) -> float:
        """The GPU's, in the precision of the run."""
        return self.gpu.peak_tflops(self.options.dtype)

    @property
    def seconds_of_products(self) -> float:
        """Of a step, at the assumed utilisation."""
        return self.batches.accumulation_steps * self.cost.flops / (self.peak_tflops * 1e12 * self.options.utilisation)

    @property
    def seconds_of_launches(self) -> float:
        """Of a step whose operations are too small to keep the GPU busy."""
        return self.batches.accumulation_steps * self.cost.operations * SECONDS_PER_OPERATION

    @property
    def days(self) -> float:
        """Of the token budget: launches and products overlap, so that the slower of both counts."""
        return self.options.train_steps * max(self.seconds_of_products, self.seconds_of_launches) / 86400

    @property
    def flops_per_token(self) -> float:
        """Of all ranks of a TP group together."""
        return self.cost.flops * self.options.tp_size / (self.batches.micro_batch_size * self.options.seq_len)


def plan(options: PlanOptions) -> RunPlan:
    """Count a run.  Raises InputError where the options do not fit one another."""
    model = options.student_of(teacher_config(options.teacher))
    _check_sizes(options, model)
    batches = plan_batches(options, options.num_gpus // options.tp_size)
    zero = Zero.of(merge_ds_config(load_ds_config(options.ds_config), options, batches))
    cost = _cost(options, model, batches.micro_batch_size, _activation_dtype(options, zero), zero.stage == 3)
    memory = plan_memory(options.stage_type, model, options, zero, batches, cost)
    parameters = Parameters.of(build_on_meta(options.stage_type, model, options))
    return RunPlan(options, find_gpu(options.gpu), parameters, zero, batches, memory, cost)


def _check_sizes(options: PlanOptions, model: ModelConfig) -> None:
    for name, count in (("--num_gpus", options.num_gpus), ("num_heads", model.num_heads)):
        if count % options.tp_size:
            raise InputError(f"--tp_size={options.tp_size} does not divide {name}={count}; use {either(divisors(count))}")
    if options.seq_len > model.max_position_embeddings:
        raise InputError(f"--seq_len={options.seq_len} is longer than the model's max_position_embeddings={model.max_position_embeddings}")
    if options.reset_at_documents:
        raise InputError("--reset_at_documents is not planned: what it takes depends on the documents; leave it out, it costs little")


def _activation_dtype(options: TrainOptions, zero: Zero) -> torch.dtype:
    """fp32 also where ZeRO 0 leaves bf16 to autocast, which keeps part of the activations in fp32: more than they take."""
    return torch.bfloat16 if options.dtype == "bf16" and zero.stage else torch.float32


_IRRELEVANT = ("ds_config", "num_gpus", "gpu", "utilisation", "json", "train_tokens", "global_batch_size", "micro_batch_size")


def _cost(options: PlanOptions, model: ModelConfig, micro_batch_size: int, dtype: torch.dtype, zero3: bool) -> StepCost:
    """`step_cost`, once for all options that differ in nothing that it looks at."""
    blank = {field.name: field.default for field in dataclasses.fields(options) if field.name in _IRRELEVANT}
    return _cached_cost(dataclasses.replace(options, **blank), model, micro_batch_size, dtype, zero3)


@functools.cache
def _cached_cost(options: PlanOptions, model: ModelConfig, micro_batch_size: int, dtype: torch.dtype, zero3: bool) -> StepCost:
    return step_cost(options.stage_type, model, options, micro_batch_size, dtype, zero3=zero3)


# ---- what to change -----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Change:
    """Other options that fit."""

    text: str
    """As they are typed."""
    plan: RunPlan


def changes_that_fit(found: RunPlan) -> list[Change]:
    """Each single change that makes a run fit; where none does, several together, none of them stronger than it must be, or nothing."""
    singles = list(_single_changes(found))
    fitting = [change for values in singles if (change := _try(found, [values])) is not None]
    if fitting:
        return fitting
    strongest = list({tuple(values): values for values in singles}.values())  # the last of each option goes furthest
    for count in range(2, len(strongest) + 1):
        change = _try(found, strongest[:count])
        if change is not None:
            return [_milder(found, strongest[:count], singles) or change]
    return []


def _milder(found: RunPlan, changes: list[dict], singles: list[dict]) -> Change | None:
    """The same changes with each taken back as far as the run still fits, the dearest in speed first; None where none can be."""
    best = None
    for place in reversed(range(len(changes))):
        names = tuple(changes[place])
        weaker = [{}, *(values for values in singles if tuple(values) == names and values != changes[place])]
        for values in weaker:
            trial = [*changes[:place], values, *changes[place + 1 :]]
            change = _try(found, trial)
            if change is not None:
                changes, best = trial, change
                break
    return best


def _single_changes(found: RunPlan) -> Iterator[dict]:
    """Values by option, the cheapest in speed first, and of each option the smallest change first."""
    options, batches = found.options, found.batches
    higher = [f"zero{stage}.json" for stage in range(max(1, found.zero.stage + 1), 4)]
    if not found.zero.offload_optimizer:
        higher += ["zero2_offload.json", "zero3_offload.json"]
    for name in higher:
        path = Path(options.ds_config).with_name(name)
        if path.is_file():
            yield {"ds_config": str(path)}
    if not options.activation_checkpointing:
        yield {"activation_checkpointing": True}
    for size in reversed(divisors(batches.micro_batch_size)[:-1]):
        yield {"micro_batch_size": size}
    size = 2 * options.tp_size
    while options.num_gpus % size == 0 and size <= 8:
        yield {"tp_size": size}
        size *= 2


def _try(found: RunPlan, changes: list[dict]) -> Change | None:
    values = {name: value for change in changes for name, value in change.items()}
    try:
        other = plan(dataclasses.replace(found.options, **values))
    except InputError:  # such as a tp_size that does not divide the heads
        return None
    return Change(" ".join(_typed(name, value) for name, value in values.items()), other) if other.fits else None


def _typed(name: str, value) -> str:
    return f"--{name}" if value is True else f"--{name} {value}"


# ---- for people and programs --------------------------------------------------------------------------------------------------------


def report(found: RunPlan, changes: list[Change]) -> list[str]:
    """Lines of text."""
    return [*_header(found), "", *_memory_table(found), "", *_verdict(found, changes), "", *_time(found)]


def _header(found: RunPlan) -> list[str]:
    options, batches, count = found.options, found.batches, found.parameters
    trainable = f"{format_count(count.trainable)} trainable ({count.trainable})"
    second = f", {format_count(count.teacher)} of a second model, the teacher" if count.teacher else ""
    zero = f"ZeRO {found.zero.stage}" + (", offload" if found.zero.offload_optimizer or found.zero.offload_parameters else "")
    checkpointing = ", activation checkpointing" if options.activation_checkpointing else ""
    return [
        f"stage {options.stage} of {options.teacher}, recipe {options.recipe}, on {options.num_gpus} × {options.gpu}",
        f"  parameters of a rank  {trainable}, {format_count(count.frozen)} frozen{second}",
        f"  engine                {zero}, tp {options.tp_size} × dp {batches.dp_size}, {options.dtype}{checkpointing}",
        f"  batch                 micro {batches.micro_batch_size} × accumulation {batches.accumulation_steps} × dp {batches.dp_size}, "
        f"{options.seq_len} tokens a sequence",
    ]


def _memory_table(found: RunPlan) -> list[str]:
    rows = [part for part in found.memory.parts if any(getattr(part, phase) for phase in PHASES)]
    width = max(len(part.name) for part in rows)
    lines = [f"{'GiB of each GPU':<{width}}{'start':>9}{'step':>9}{'update':>9}"]
    lines += [f"{part.name:<{width}}" + "".join(f"{_gib(getattr(part, phase)):>9}" for phase in PHASES) for part in rows]
    lines.append(f"{'sum':<{width}}" + "".join(f"{_gib(found.memory.total(phase)):>9}" for phase in PHASES))
    if found.memory.host:
        lines.append(f"{'in host memory, each rank':<{width}}{'':>9}{_gib(found.memory.host):>9}")
    return lines


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size else "-"


def _verdict(found: RunPlan, changes: list[Change]) -> list[str]:
    room = f"{found.room / GIB:.1f} GiB ({found.gpu.memory_gib:g} less {RESERVED_GIB:g} for CUDA and NCCL)"
    if found.fits:
        return [f"fits: {_gib(found.memory.peak)} of {room}"]
    lines = [f"does not fit: {_gib(found.memory.peak)} of {room}"]
    lines += [f"  would fit with {change.text}: {_gib(change.plan.memory.peak)} GiB, {change.plan.days:.3g} days" for change in changes]
    return lines if changes else [*lines, "  nothing tried fits: use more GPUs, larger ones or shorter sequences"]


def _time(found: RunPlan) -> list[str]:
    options = found.options
    budget = format_count(options.train_steps * options.tokens_per_step)
    lines = [
        f"{options.train_steps} steps, {budget} tokens: {found.days:.3g} days, {found.days * options.num_gpus * 24:.3g} GPU hours",
        f"  at {options.utilisation:.0%} of {found.peak_tflops:g} TFLOP/s (assumed; --utilisation) and {found.flops_per_token:.3g} "
        "operations a token, counted in the model's matrix products",
    ]
    if found.seconds_of_launches > found.seconds_of_products:
        lines.append(
            f"  bound by launches: {found.cost.operations} operations a micro-batch at {SECONDS_PER_OPERATION * 1e6:g} µs (assumed); "
            + _fewer_launches(found)
        )
    return [*lines, "  waiting for data, other ranks, evaluations and saves is not counted"]


def _fewer_launches(found: RunPlan) -> str:
    by_channel = getattr(found.options, "decay", None) == "channel"
    less = ", and a decay other than `channel`, whose scan goes token by token, fewer by far" if by_channel else ""
    return f"larger micro-batches have fewer a token{less}"


def record(found: RunPlan, changes: list[Change]) -> dict:
    """The same for programs; memory in bytes."""
    return {
        "options": dataclasses.asdict(found.options),
        "parameters": dataclasses.asdict(found.parameters),
        "batches": dataclasses.asdict(found.batches) | {"accumulation_steps": found.batches.accumulation_steps},
        "memory": [dataclasses.asdict(part) for part in found.memory.parts],
        "memory_peak": found.memory.peak,
        "memory_room": found.room,
        "host_memory": found.memory.host,
        "fits": found.fits,
        "changes_that_fit": [{"change": change.text, "memory_peak": change.plan.memory.peak} for change in changes],
        "steps": found.options.train_steps,
        "flops_per_token": found.flops_per_token,
        "days": found.days,
    }
