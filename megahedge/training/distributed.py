"""Joining a job, and what its ranks must do together or not at all."""

import contextlib
import datetime
import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.distributed_c10d import _get_default_store

from megahedge.parallel.topology import Topology
from megahedge.training.op_builds import prepare_op_builds
from megahedge.utils.errors import InputError, RunError
from megahedge.utils.files import free_bytes
from megahedge.utils.launcher import launcher_number, told_number
from megahedge.utils.logging import get_logger, log_once_a_node
from megahedge.utils.units import format_bytes
from megahedge.utils.words import divisors, either

logger = get_logger(__name__)

# Long enough for rank 0 to digest a checkpoint of a large model while the others wait for its verdict.
TIMEOUT = datetime.timedelta(hours=1)
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process has terminated")
"""What gloo and NCCL say of a rank that has died."""
_PLACE, _GONE, _ASKED = "megahedge/place/", "megahedge/gone/", "megahedge/asked/"
"""Keys of the job's store, a rank's number after them."""
_SECONDS_TO_LOOK_FOR_LOST = 3.0
"""Less than a launcher leaves the ranks to end by themselves."""
SHARED_MEMORY = Path("/dev/shm")
_SHARED_BUFFER_BYTES, _NCCL_SHARED_BYTES = 67 << 20, 1 << 30
"""Shared memory of each rank for DeepSpeed's reductions on a CPU; of a node for NCCL, as NVIDIA advises to give containers."""
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
"""How torchrun, DeepSpeed and Slurm tell the ranks of a node."""
FOR_USERS = (InputError, RunError)
DISK_ERRORS = (OSError, SafetensorError)  # safetensors tells of a full disk by an exception of its own


def init_distributed(tp_size: int) -> Topology:
    """Join the job that the launcher's environment describes (alone where it describes none) and cut it into TP × DP groups.

    Raises InputError where tp_size does not divide the number of processes, or the environment is incomplete; before any process
    waits for another.  Raises RunError where the ranks cannot meet.
    """
    describe_job()
    world_size = launcher_number("WORLD_SIZE")
    if world_size % tp_size:
        raise InputError(f"--tp_size={tp_size} does not divide the number of processes {world_size}; use {either(divisors(world_size))}")
    quiet_deepspeed()
    prepare_op_builds()
    import deepspeed

    if torch.cuda.is_available():
        torch.cuda.set_device(own_gpu())
    if world_size > 1 and not dist.is_initialized():
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        logger.info("rank 0 of %d: waiting at %s for the others", world_size, where)
    shortage = missing_shared_memory(num_local_ranks()) if world_size > 1 else None
    if shortage is not None:
        log_once_a_node(logger, logging.WARNING, shortage)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=TIMEOUT)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise cannot_meet(error) from None
    _tell_where_i_am()
    if backend == "gloo":
        _unname_shared_buffer()
    return Topology.create(tp_size)


def cannot_meet(error: Exception) -> RunError:
    """What to tell of ranks that do not find each other, from what torch's store says."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    reason = "another job has this port" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
    advice = "give the launcher another --master_port, or set MASTER_ADDR to a name or address that all nodes reach"
    return RunError(f"the ranks cannot meet at {address}: {reason}; {advice}")


def num_local_ranks() -> int:
    """Ranks of the job on this node; all of them where the launcher does not tell."""
    told = [number for name in (*_LOCAL_SIZES, "WORLD_SIZE") if (number := told_number(name)) is not None]
    return min(told[0], told_number("WORLD_SIZE") or 1) if told else 1  # a shell of Slurm's may tell of tasks that are none of ours


def missing_shared_memory(processes: int) -> str | None:
    """What to tell where so many processes of this node have too little shared memory to train together, which would end them by SIGBUS."""
    needed = _NCCL_SHARED_BYTES if torch.cuda.is_available() else processes * _SHARED_BUFFER_BYTES
    free = free_bytes(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else 0
    if free >= needed:
        return None
    return (
        f"{SHARED_MEMORY} has {format_bytes(free)} free, and {processes} processes on one machine want {format_bytes(needed)}; give the "
        "container more: --shm-size or --ipc=host"
    )


def _unname_shared_buffer() -> None:
    """Let the buffer of DeepSpeed's reductions on a CPU, 67 MB of shared memory a rank, go with the processes that have opened it.

    Its name alone would keep it, and the memory with it, where a rank is killed.
    """
    dist.barrier()  # all ranks have opened it by now
    address = "_".join((str(os.getuid()), *(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")), str(dist.get_rank())))
    (SHARED_MEMORY / f"deepspeed_allreduce_buffer_{address}").unlink(missing_ok=True)


def describe_job() -> None:
    """Let the environment describe a job of one process where it describes none.  Raises InputError where it describes one badly."""
    if not dist.is_initialized():
        check_environment()
        _complete_environment()


def check_environment() -> None:
    """Raise InputError for numbers of ranks that cannot be, at which the ranks would wait for each other in vain.

    What is not set is no fault yet: a plan needs at most the size of the job.
    """
    # without a rank the others are not looked at: `_complete_environment` sets them or asks for them all
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT") if "RANK" in os.environ else ("WORLD_SIZE",)
    numbers = {name: launcher_number(name) for name in names if name in os.environ}
    world_size = numbers.get("WORLD_SIZE")
    if world_size == 0:
        raise InputError("the environment says WORLD_SIZE=0; a job has 1 process or more")
    if world_size is not None and numbers.get("RANK", 0) >= world_size:
        raise InputError(f"the environment says RANK={numbers['RANK']} of WORLD_SIZE={world_size}; ranks count from 0")
    if not 0 < numbers.get("MASTER_PORT", 1) < 1 << 16:
        raise InputError(f"the environment says MASTER_PORT={numbers['MASTER_PORT']}; ports go from 1 to 65535")


def _complete_environment() -> None:
    """Describe a job of one process where nothing describes a job."""
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if "RANK" in missing and launcher_number("WORLD_SIZE", 1) == 1:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    elif missing:
        given = "WORLD_SIZE" if "RANK" in missing else "RANK"
        raise InputError(f"{given} is set without {', '.join(missing)}; start with the deepspeed launcher or torchrun, or set them all")


def own_gpu() -> int:
    """Number of this rank's GPU among those that it sees.  Raises InputError where there is none for it."""
    return _own_gpu(launcher_number("LOCAL_RANK"), torch.cuda.device_count())


def _own_gpu(local_rank: int, visible: int) -> int:
    """Where the scheduler shows each rank its own GPU alone, that one."""
    if local_rank < visible:
        return local_rank
    if visible == 1:
        return 0
    raise InputError(f"LOCAL_RANK={local_rank} has no GPU: {visible} are visible; start as many ranks a node as it has GPUs")


def check_device(devices: Path = Path("/dev")) -> None:
    """Raise InputError where this machine has GPUs that torch cannot use: training on its processors would take weeks, unnoticed."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    if torch.cuda.is_available() or hidden or not any(devices.glob("nvidia[0-9]*")):
        return
    raise InputError(
        f"this machine has GPUs, and torch {torch.__version__} cannot use them: install torch's CUDA build in this environment (README, "
        "Installation); to train on the processors all the same, set CUDA_VISIBLE_DEVICES to nothing"
    )


def quiet_deepspeed() -> None:
    """Let DeepSpeed use the device that we use, and keep its own log to warnings unless the user has set its level."""
    os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
    from deepspeed.utils import logger as deepspeed_logger

    # DeepSpeed calls collectives by names that torch 2.13 renames, and warns of it at every one
    warnings.filterwarnings("ignore", message="`torch.distributed.*` is deprecated", category=FutureWarning)
    level = os.environ.get("DEEPSPEED_LOG_LEVEL", "WARNING")
    if level.upper() not in logging.getLevelNamesMapping():
        raise InputError(f"the environment says DEEPSPEED_LOG_LEVEL={level!r}, which is no level; use debug, info, warning or error")
    deepspeed_logger.setLevel(level.upper())
    # our optimizer is torch's AdamW with a gate, and tested under every stage; of skipped steps the loop tells, with their samples
    deepspeed_logger.addFilter(lambda record: not any(words in record.getMessage() for words in ("untested optimizer", "OVERFLOW")))
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _tell_where_i_am() -> None:
    """Let the other ranks know this process, so that they can say which one has gone."""
    _get_default_store().set(f"{_PLACE}{dist.get_rank()}", f"{_machine()} {os.getpid()}")


def _machine() -> str:
    """Where process numbers mean the same: the start of this machine's kernel, and the container within; empty where nothing tells."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + "/" + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _lost_ranks() -> list[int] | None:
    """Ranks whose process is no more, as those on its machine have seen; empty where nobody has, None where nobody can be asked."""
    store, ranks = _get_default_store(), range(dist.get_world_size())

    def gone() -> list[int]:
        for rank in [rank for rank, process in processes.items() if not _is_alive(process)]:
            store.set(f"{_GONE}{rank}", "")
        return [rank for rank in ranks if store.check([f"{_GONE}{rank}"])]

    try:
        places = {rank: store.get(f"{_PLACE}{rank}").decode().rsplit(" ", 1) for rank in ranks if store.check([f"{_PLACE}{rank}"])}
        processes = {rank: int(process) for rank, (machine, process) in places.items() if machine and machine == _machine()}
        found = _wait_for(gone)  # a process that is killed closes its connections some time before it has gone
        store.set(f"{_ASKED}{dist.get_rank()}", "")
        if dist.get_rank() == 0:  # with this process the store goes, so the others ask first
            _wait_for(lambda: all(rank in found or store.check([f"{_ASKED}{rank}"]) for rank in ranks))
    except RuntimeError:  # the store has gone, and with it the rank that holds it
        return None
    return found


def _wait_for(condition: Callable[[], object]):
    """The first true value of the condition, or its last one when the time to look for lost ranks is over."""
    deadline = time.monotonic() + _SECONDS_TO_LOOK_FOR_LOST
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


def _is_alive(process: int) -> bool:
    """Whether there is a process of that number, other than one that is dead and whose parent has not looked yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def tell_of_lost_ranks() -> Iterator[None]:
    """Within `with`, what a collective raises when another rank has died becomes a RunError that names it where it can."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RunError) or not any(words in str(error) for words in LOST):
            raise
        raise RunError(
            f"{_tell_who(_lost_ranks())} gone; the output of what has gone says why, unless it was killed; "
            "--resume goes on from the last checkpoint"
        ) from error


def _tell_who(lost: list[int] | None) -> str:
    if lost is None:
        return "rank 0 of the job, by which the ranks find each other, has"  # perhaps because another one had, and it had waited enough
    if not lost:
        return "another rank of the job has"
    return f"rank {lost[0]} of the job has" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} of the job have"


def on_first_rank(action: Callable[[], object], doing: str):
    """Run `action` on rank 0 alone and give every rank its result, or raise on every rank where it fails there.  Collective.

    Without this a rank 0 that fails leaves the others waiting in their next collective.  InputError and RunError arrive as they are;
    what a disk does becomes a RunError that names the action, `doing`.  Anything else is a fault of ours: rank 0 raises it with its
    traceback, the others a RunError.
    """
    result, error = None, None
    if dist.get_rank() == 0:
        try:
            result = action()
        except Exception as caught:
            error = caught
    told = error if error is None or isinstance(error, FOR_USERS) else RunError(f"{doing}: {error}")
    outcome = [result, told]
    dist.broadcast_object_list(outcome, src=0)
    if error is not None and not isinstance(error, FOR_USERS + DISK_ERRORS):
        raise error
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
