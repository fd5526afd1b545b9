"""One report of a machine, or of all ranks of a job."""

import logging
import os
import sys
from pathlib import Path

from megahedge.data.blending import parse_data_path
from megahedge.data.indexed_dataset import idx_path
from megahedge.doctor.backends import look_at_backends
from megahedge.doctor.data import TeacherFound, look_at_data, look_at_teacher
from megahedge.doctor.disk import look_at_disk, look_at_network
from megahedge.doctor.hardware import look_at_hardware
from megahedge.doctor.memory import look_at_memory
from megahedge.doctor.options import DoctorOptions
from megahedge.doctor.ranks import RanksCheck
from megahedge.doctor.report import Section, examine, publish
from megahedge.doctor.software import PackageTrial, look_at_software
from megahedge.training.metrics import check_wandb
from megahedge.utils.launcher import global_rank
from megahedge.utils.logging import get_logger

USUAL_HEAD_DIM = 64
"""For the scans, where no teacher says another."""


def doctor(options: DoctorOptions) -> int:
    """Look at everything, print what was found on rank 0, and return 1 where something keeps a run from training, else 0.

    Raises RunError on the other ranks where they do not meet rank 0, InputError where the environment describes no job.
    """
    get_logger("kernels").setLevel(logging.WARNING)  # plans try scans out, and the report says which backend runs them
    check = RanksCheck(shared_places(options))
    if global_rank() != 0:
        return _take_part(check)
    trial = PackageTrial()
    ranks = examine("ranks", check)  # first: the others are waiting
    fit = publish(_examine_machine(options, trial, ranks), options.json)
    return _end(0 if fit else 1, check)


def _examine_machine(options: DoctorOptions, trial: PackageTrial, ranks: Section) -> list[Section]:
    """All sections, in the order of the report."""
    teacher = TeacherFound()
    hardware = examine("hardware", lambda section: look_at_hardware(section, options))
    sections = [
        examine("teacher", lambda section: look_at_teacher(section, options, teacher)),
        examine("data", lambda section: look_at_data(section, options, teacher)),
        examine("memory plan", lambda section: look_at_memory(section, options, teacher)),
        examine("disk", lambda section: look_at_disk(section, options, teacher)),
        examine("network", lambda section: look_at_network(section, options, teacher)),
    ]
    head_dim = teacher.config.head_dim if teacher.config else USUAL_HEAD_DIM
    backends = examine("backends of the scan that --backend auto takes", lambda section: look_at_backends(section, head_dim))
    software = examine("software", lambda section: _look_at_software(section, options, trial))  # its imports have had time meanwhile
    return [software, hardware, ranks, backends, *sections]


def _look_at_software(section: Section, options: DoctorOptions, trial: PackageTrial) -> None:
    look_at_software(section, trial)
    check_wandb(options.wandb_project)


def shared_places(options: DoctorOptions) -> dict[str, Path]:
    """What every node must see, by option; a teacher's hub name is no place."""
    places = {}
    if options.data_path:
        prefix = parse_data_path(options.data_path)[0][1]
        pair = idx_path(prefix)
        places["data_path"] = pair if pair.exists() else idx_path(f"{prefix}_train")
    if options.teacher is not None and os.path.isabs(options.teacher):
        places["teacher"] = Path(options.teacher)
    if options.output_dir is not None:
        places["output_dir"] = Path(options.output_dir).absolute().parent
    return places


def _take_part(check: RanksCheck) -> int:
    """The part of a rank that prints nothing."""
    try:
        check(Section("ranks"))
    except Exception:
        if not check.hangs:
            raise
        return _end(1, check)
    return 0


def _end(status: int, check: RanksCheck) -> int:
    """The status; at once, where a collective under way would keep the process from ending."""
    if check.hangs:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
