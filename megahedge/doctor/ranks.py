"""Who takes part in the job, where, and whether all of them together can add numbers up."""

import dataclasses
import importlib.metadata
import os
import platform
import socket
from pathlib import Path

import torch

from megahedge.doctor.report import Section
from megahedge.training.distributed import describe_job, init_distributed, own_gpu, tell_of_lost_ranks
from megahedge.training.meeting import LARGE_BYTES, SMALL_BYTES, roll_call, time_all_reduces
from megahedge.utils.errors import InputError, RunError
from megahedge.utils.units import format_bytes
from megahedge.utils.versions import code_version
from megahedge.utils.words import ranks_have

_ALIKE = ("python", "torch", "deepspeed", "code")
"""What is the same on all ranks of a sound job."""


def own_facts(places: dict[str, Path]) -> dict:
    """What a rank says of itself, and which of the places it does not see."""
    describe_job()
    return {
        "host": socket.gethostname(),
        "device": _device(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": importlib.metadata.version("deepspeed"),
        "code": "{version}, commit {git_commit}".format(**code_version()),
        "unseen": [option for option, path in places.items() if not path.exists()],
    }


def _device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    try:
        return f"cuda:{own_gpu()}, {torch.cuda.get_device_name(own_gpu())}"
    except InputError as error:
        return f"none: {error}"


@dataclasses.dataclass
class RanksCheck:
    """The part of the doctor that all ranks make together; its section is filled on rank 0."""

    places: dict[str, Path]
    """Files and folders that every node must see, by option."""
    hangs: bool = False
    """Whether a collective is still under way, so that the process ends only by os._exit."""

    def __call__(self, section: Section) -> None:
        """Collective.  Raises RunError where the ranks do not meet."""
        called = roll_call(own_facts(self.places))
        for rank, facts in called.facts.items():
            section.row(f"rank {rank}", f"{facts['host']}, {facts['device']}")
        section.figures |= {"ranks": called.facts, "missing": called.missing}
        _compare(section, called.facts)
        if called.missing:
            raise RunError(
                f"{ranks_have(called.missing)} not come to {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}; look at their output, "
                "whether they were started, and whether MASTER_ADDR is a name that their machines reach"
            )
        if os.environ["WORLD_SIZE"] == "1":
            section.row("all-reduce", "one process has nobody to add up with; start the doctor as a stage is started to try it")
        else:
            self._add_up(section)

    def _add_up(self, section: Section) -> None:
        init_distributed(tp_size=1)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.hangs = True  # until it has not
        with tell_of_lost_ranks():
            small, large = time_all_reduces(device)
        self.hangs = False
        section.row(f"all-reduce, {SMALL_BYTES} bytes", f"right sum, {small.seconds * 1e6:.0f} µs")
        speed = f"{large.seconds * 1e3:.1f} ms, {large.bus_bytes_per_second / 1e9:.2f} GB/s of bus bandwidth as nccl-tests counts it"
        section.row(f"all-reduce, {format_bytes(LARGE_BYTES)}", f"right sum, {speed}")
        section.figures |= {"all_reduces": [dataclasses.asdict(timing) for timing in (small, large)]}


def _compare(section: Section, facts: dict[int, dict]) -> None:
    """What differs between ranks, or is not there for some of them."""
    for name in _ALIKE:
        values = {}
        for rank, said in facts.items():
            values.setdefault(said[name], []).append(rank)
        if len(values) > 1:
            told = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.items())
            section.problems.append(f"the ranks differ in {name}: {told}; start all of them in one environment")
    for option in dict.fromkeys(option for said in facts.values() for option in said["unseen"]):
        blind = [rank for rank, said in facts.items() if option in said["unseen"]]
        if len(blind) < len(facts):
            hosts = ", ".join(sorted({facts[rank]["host"] for rank in blind}))
            section.problems.append(f"--{option} is not there for {_ranks(blind)} on {hosts}; put it where all nodes see it")
    for rank, said in facts.items():
        if said["device"].startswith("none"):
            section.problems.append(f"rank {rank} on {said['host']} has no device: {said['device'].removeprefix('none: ')}")


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
