"""What both stages take of each GPU, by stages/plan.py, and of the disk."""

import dataclasses

import torch

from megahedge.config.options import DataOptions, RunOptions, read_recipe
from megahedge.config.published import GPUS, known_gpu
from megahedge.doctor.data import TeacherFound
from megahedge.doctor.hardware import memory_bytes
from megahedge.doctor.options import DoctorOptions
from megahedge.doctor.report import Section
from megahedge.stages.plan import PLANS, RESERVED_BYTES, PlanOptions, RunPlan, changes_that_fit, plan, teacher_config
from megahedge.stages.step_cost import build_on_meta
from megahedge.training.checkpointing import checkpoint_bytes
from megahedge.training.distributed import num_local_ranks
from megahedge.utils.launcher import told_number
from megahedge.utils.units import format_bytes


def look_at_memory(section: Section, options: DoctorOptions, teacher: TeacherFound) -> None:
    """The fullest moment of each stage against what this machine has."""
    if options.teacher is None:
        section.row("plan", "needs a --teacher")
        return
    if options.reset_at_documents:
        section.row("", "without --reset_at_documents, which costs little and is not planned")
    for stage in PLANS:
        found = section.attempt(f"stage {stage}", lambda stage=stage: plan(plan_options(stage, options, teacher)))
        if found is not None:
            peak = found.memory.peak
            host = f", and {format_bytes(found.memory.host)} in the host's memory" if found.memory.host else ""
            section.row(f"stage {stage}", f"{format_bytes(peak)} on each device at the fullest moment{host}")
            section.figures |= {f"stage{stage}": {"peak": peak, "host": found.memory.host, "batches": dataclasses.asdict(found.batches)}}
            (_compare_with_gpu if torch.cuda.is_available() else _compare_with_host)(section, found)
    section.row("", "python tools/plan.py says part by part what it goes into, and what would take less")


def plan_options(stage: int, options: DoctorOptions, teacher: TeacherFound) -> PlanOptions:
    """Those of tools/plan.py: the recipe's, and what the doctor was told in place of them.  Raises InputError where they do not fit."""
    shared = {field.name: getattr(options, field.name) for group in (DataOptions, RunOptions) for field in dataclasses.fields(group)}
    gpu = known_gpu(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    kind = {} if gpu is None else {"gpu": next(name for name, listed in GPUS.items() if listed is gpu)}
    values = read_recipe(options.recipe)[f"stage{stage}"] | shared | kind
    # of a number that cannot be the section on ranks tells
    values |= {"recipe": options.recipe, "reset_at_documents": False, "num_gpus": told_number("WORLD_SIZE") or 1}
    return PLANS[stage](**values, teacher=str(teacher.folder or options.teacher))


def _compare_with_gpu(section: Section, found: RunPlan) -> None:
    """Against the GPU that is here, whether or not it is one that plans know."""
    peak, stage = found.memory.peak, found.options.stage
    free, total = torch.cuda.mem_get_info()
    if peak > total - RESERVED_BYTES:
        listed = known_gpu(torch.cuda.get_device_name()) is not None
        changes = changes_that_fit(found) if listed and not found.fits else []
        advice = f"it would fit with {changes[0].text}" if changes else f"ask python tools/plan.py --stage {stage} for what would take less"
        section.problems.append(
            f"stage {stage} needs {format_bytes(peak)} on each GPU beside {format_bytes(RESERVED_BYTES)} for CUDA and NCCL, and there are "
            f"{format_bytes(total)}; {advice}"
        )
    elif peak > free - RESERVED_BYTES:
        section.warnings.append(
            f"stage {stage} needs {format_bytes(peak)} on each GPU, and {format_bytes(free)} are free: end what else is on it (nvidia-smi)"
        )


def _compare_with_host(section: Section, found: RunPlan) -> None:
    """Without GPUs the ranks of a machine share its memory."""
    needed, available = num_local_ranks() * (found.memory.peak + found.memory.host), memory_bytes()[0]
    if needed > available:
        section.warnings.append(
            f"stage {found.options.stage} needs about {format_bytes(needed)} of this machine's memory, and {format_bytes(available)} are "
            "available; take a lower --micro_batch_size, --activation_checkpointing, or a GPU"
        )


def checkpoint_sizes(options: DoctorOptions, teacher: TeacherFound) -> dict[int, int]:
    """Bytes of a checkpoint by stage.  Raises InputError where the options do not fit."""
    sizes = {}
    for stage in PLANS:
        chosen = dataclasses.replace(plan_options(stage, options, teacher), tp_size=1)  # which makes no difference to it
        model = chosen.student_of(teacher_config(chosen.teacher))
        sizes[stage] = checkpoint_bytes(build_on_meta(chosen.stage_type, model, chosen).student)
    return sizes
