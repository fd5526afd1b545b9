"""Where a run would write, the temporary folder, and the way to the Hugging Face hub."""

import os
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

import huggingface_hub.constants

from megahedge.doctor.data import TeacherFound
from megahedge.doctor.memory import checkpoint_sizes
from megahedge.doctor.options import DoctorOptions
from megahedge.doctor.report import Section
from megahedge.training.checkpointing import missing_room
from megahedge.training.run_folder import RunFolder, without_locks
from megahedge.utils.errors import InputError
from megahedge.utils.files import free_bytes, lock_fault, nearest_folder, why_not_writable
from megahedge.utils.units import format_bytes

DEFAULT_OUTPUT = "runs"
"""Where the stages put their run folders unless they are told."""
TEMPORARY_BYTES = 1 << 30
HUB_SECONDS = 4.0


def look_at_disk(section: Section, options: DoctorOptions, teacher: TeacherFound) -> None:
    """Room, rights and locks where the run goes, and room for temporary files."""
    run = RunFolder(options.output_dir or DEFAULT_OUTPUT)
    held = "; holds a run, with which a stage goes on by --resume" if run.record_file.is_file() else ""
    section.row("run folder", f"{run.path}{'' if options.output_dir else ' (--output_dir is not given)'}{held}")
    fault = why_not_writable(run.record_file)
    if fault is not None:
        raise InputError(f"--output_dir={run.path} cannot be written to: {fault}; name a folder elsewhere")
    section.row("free there", format_bytes(free_bytes(run.path)))
    section.figures |= {"run_folder": str(run.path), "free": free_bytes(run.path)}
    _look_at_locks(section, run.path)
    _look_at_room(section, run, options, teacher)
    _look_at_temporary_folder(section)


def _look_at_locks(section: Section, path: Path) -> None:
    fault = lock_fault(nearest_folder(path))
    section.row("file locks", "work, on this node" if fault is None else f"do not work: {fault}")
    section.figures |= {"locks": fault is None}
    if fault is not None:
        section.warnings.append(without_locks(path, fault))


def _look_at_room(section: Section, run: RunFolder, options: DoctorOptions, teacher: TeacherFound) -> None:
    if options.teacher is None:
        section.row("a checkpoint", "depends on the --teacher")
        return
    sizes = section.attempt("a checkpoint", lambda: checkpoint_sizes(options, teacher))
    if sizes is None:
        return
    section.row("a checkpoint", ", ".join(f"stage {stage}: {format_bytes(size)}" for stage, size in sizes.items()))
    section.figures |= {"checkpoint_bytes": {f"stage{stage}": size for stage, size in sizes.items()}}
    # the larger stage alone, in whose words the smaller one's shortage is contained
    stage = max(sizes, key=sizes.get)
    shortage = missing_room(run.checkpoints, sizes[stage], options)
    if shortage is not None:
        section.problems.append(f"stage {stage}: {shortage}")


def _look_at_temporary_folder(section: Section) -> None:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        section.problems.append(f"there is no folder for temporary files ({error.strerror}); set TMPDIR to one that may be written")
        return
    free = free_bytes(folder)
    section.row("temporary folder", f"{folder}, {format_bytes(free)} free")
    section.figures |= {"temporary_folder": folder, "temporary_free": free}
    if free < TEMPORARY_BYTES:
        section.warnings.append(
            f"{folder} has {format_bytes(free)} free for temporary files, such as compilers leave; make room, or set TMPDIR elsewhere"
        )


def look_at_network(section: Section, options: DoctorOptions, teacher: TeacherFound) -> None:
    """Whether the Hugging Face hub answers, asked for a few seconds at most, and whether the teacher has to come from there."""
    cache = huggingface_hub.constants.HF_HUB_CACHE
    section.row("hub's cache", f"{cache}{'' if os.path.isdir(cache) else ' (not there yet)'}")
    offline = bool(huggingface_hub.constants.HF_HUB_OFFLINE)
    fault = "HF_HUB_OFFLINE is set" if offline else _why_unreachable(huggingface_hub.constants.ENDPOINT)
    section.row("Hugging Face hub", "answers" if fault is None else f"{'not asked' if offline else 'does not answer'}: {fault}")
    section.figures |= {"hub_offline": offline, "hub_reachable": None if offline else fault is None}
    if options.teacher is not None and teacher.folder is None:
        _tell_of_download(section, options.teacher, fault)


def _tell_of_download(section: Section, name: str, fault: str | None) -> None:
    fetch = f"python tools/download.py --teacher {name}"
    if fault is None:
        section.warnings.append(f"--teacher={name} is not on this machine yet; where nodes have no network, fetch it beforehand: {fetch}")
    else:
        section.problems.append(
            f"--teacher={name} is not on this machine, and the Hugging Face hub cannot be asked ({fault}); give a folder, or fetch it "
            f"where there is a network: {fetch}"
        )


def _why_unreachable(address: str) -> str | None:
    """None where it answers, whatever it says.  In a thread, as looking up a name knows no timeout."""
    answers = [f"nothing within {HUB_SECONDS:g} s"]
    thread = threading.Thread(target=lambda: answers.append(_ask(address)), daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return answers[-1]


def _ask(address: str) -> str | None:
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError:  # an answer
        return None
    except (OSError, ValueError) as error:
        return " ".join(str(getattr(error, "reason", error)).split())
    return None
