"""Memory of each GPU in a run of a stage, part by part: what DeepSpeed 0.19 holds of the parameters, and what a step adds to it."""

import dataclasses

from megahedge.config.model import ModelConfig
from megahedge.config.options import BatchPlan, TrainOptions
from megahedge.stages.base import Stage
from megahedge.stages.step_cost import StepCost, build_on_meta
from megahedge.training.distributed import quiet_deepspeed
from megahedge.training.ds_config import zero_stage

FP32, BF16 = 4, 2
"""Bytes of a number."""
MOMENTS = 2
"""Numbers that AdamW keeps of each that it trains."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Numbers that one rank of a TP group holds, before ZeRO divides them."""

    trainable: int
    frozen: int
    """Of the student."""
    teacher: int
    """Of a second model; what it shares with the student is the student's."""

    @classmethod
    def of(cls, stage: Stage) -> "Parameters":
        """Each shared parameter counts once."""
        student = list(stage.student.parameters())
        trainable = sum(parameter.numel() for parameter in student if parameter.requires_grad)
        everything = sum(parameter.numel() for parameter in stage.parameters())
        of_student = sum(parameter.numel() for parameter in student)
        return cls(trainable, of_student - trainable, everything - of_student)

    @property
    def total(self) -> int:
        """All of them."""
        return self.trainable + self.frozen + self.teacher


@dataclasses.dataclass(frozen=True)
class Zero:
    """What of DeepSpeed's settings decides about memory."""

    stage: int
    bucket: int
    """Numbers of a buffer for gradients on their way to other ranks."""
    num_buckets: int
    """Two where communication overlaps with the backward of stages 1 and 2."""
    live_parameters: int
    """Most numbers that stage 3 holds whole."""
    offload_optimizer: bool
    """Masters, moments and gradient sums lie in the host's memory."""
    offload_parameters: bool
    """Stage 3's pieces of the parameters do."""

    @classmethod
    def of(cls, ds_config: dict) -> "Zero":
        """From a DeepSpeed configuration that `merge_ds_config` has accepted."""
        quiet_deepspeed()
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        section = {key: value for key, value in ds_config.get("zero_optimization", {}).items() if value != "auto"}
        settings = DeepSpeedZeroConfig(**section)
        stage = zero_stage(ds_config)
        return cls(
            stage=stage,
            bucket=settings.reduce_bucket_size if settings.contiguous_gradients else 0,
            num_buckets=2 if settings.overlap_comm and stage < 3 else 1,
            live_parameters=settings.max_live_parameters,
            offload_optimizer=_on_host(settings.offload_optimizer),
            offload_parameters=_on_host(settings.offload_param),
        )


def _on_host(section) -> bool:
    return section is not None and section.device == "cpu"


@dataclasses.dataclass(frozen=True)
class Part:
    """One row of a plan: bytes on each GPU in the three phases that may be a run's largest."""

    name: str
    start: int = 0
    """While the model is built, before DeepSpeed has it."""
    step: int = 0
    """At the fullest moment of forward and backward."""
    update: int = 0
    """In the optimizer's update."""

    @classmethod
    def held(cls, name: str, size: int, start: int = 0) -> "Part":
        """What is there in the step and in the update alike."""
        return cls(name, start, size, size)


PHASES = ("start", "step", "update")
"""Of a Part."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each GPU, and beside it in the host's memory."""

    parts: tuple[Part, ...]
    host: int
    """Bytes of each rank that are offloaded."""

    def total(self, phase: str) -> int:
        """Of all parts in one of PHASES."""
        return sum(getattr(part, phase) for part in self.parts)

    @property
    def peak(self) -> int:
        """Most bytes at one moment."""
        return max(map(self.total, PHASES))


def plan_memory(
    stage_type: type[Stage], model: ModelConfig, options: TrainOptions, zero: Zero, batches: BatchPlan, cost: StepCost
) -> Memory:
    """Memory of a run of the stage on `batches.dp_size` × `options.tp_size` GPUs, whose micro-batch costs `cost`."""
    count = Parameters.of(build_on_meta(stage_type, model, options))
    states, host = _model_states(count, zero, options.dtype, batches.dp_size)
    kept_elsewhere = cost.kept - cost.kept_by_mixers
    # head and blocks take their turns: the larger one counts
    activations = [
        Part("activations kept: mixers, scans", step=cost.kept_by_mixers),
        Part("activations kept: the rest", step=kept_elsewhere),
        Part(f"working memory ({_larger_working(cost)})", step=cost.working),
    ]
    return Memory((*states, *activations), host)


def _larger_working(cost: StepCost) -> str:
    return "logits and loss" if cost.head_working >= cost.working else "scan, backward of a block"


def _model_states(count: Parameters, zero: Zero, dtype: str, dp_size: int) -> tuple[list[Part], int]:
    """Parameters and what the optimizer keeps of them; and the bytes of them on the host."""
    wide = dtype == "fp32"
    width = FP32 if wide or zero.stage == 0 else BF16
    whole, own = count.total, _share(count.trainable, dp_size)
    share = dp_size if zero.stage == 3 else 1
    student, teacher = (_share(numbers, share) * width for numbers in (count.trainable + count.frozen, count.teacher))
    masters = 0 if zero.stage == 0 or (zero.stage == 3 and wide) else own * FP32
    moments = (own if zero.stage else count.trainable) * MOMENTS * FP32
    gradients = (own if zero.stage >= 2 else count.trainable) * FP32
    offloaded = {
        "parameters": student + teacher if zero.offload_parameters else 0,
        "optimizer": masters + moments + gradients if zero.offload_optimizer else 0,
    }
    if zero.offload_parameters:
        student = teacher = 0
    if zero.offload_optimizer:
        masters = moments = gradients = 0
    built = [numbers * FP32 for numbers in (count.trainable + count.frozen, count.teacher)]
    parts = [
        Part.held("parameters of the student", student, built[0]),
        Part.held("parameters of the teacher", teacher, built[1]),
        Part("parameters gathered by ZeRO 3", step=min(whole, zero.live_parameters) * width if zero.stage == 3 else 0),
        Part("bf16 copies that autocast makes", step=whole * BF16 if zero.stage == 0 and not wide else 0),
        Part.held("gradients, fp32", gradients),
        Part.held("masters, fp32", masters),
        Part.held("moments of AdamW, fp32", moments),
        # ZeRO 0 has no buffers while the backward runs; ZeRO 1 sums over ranks in fp32
        Part("buckets of communication", step=zero.bucket * zero.num_buckets * (width if zero.stage > 1 else FP32) if zero.stage else 0),
        Part("working memory of the update", update=_update(count, zero, own)),
    ]
    return parts, sum(offloaded.values())


def _share(numbers: int, ranks: int) -> int:
    """Of each rank, the last one's padding included."""
    return -(-numbers // ranks)


def _update(count: Parameters, zero: Zero, own: int) -> int:
    """A flat fp32 copy of the gradients of what this rank updates, and AdamW's square roots; none where the host updates.

    At ZeRO 0 these take their turns: the copy is made to be summed over the ranks.
    """
    if zero.offload_optimizer:
        return 0
    return count.trainable * FP32 if zero.stage == 0 else 2 * own * FP32
