"""Which ranks share a model (tensor parallel, TP) and which share nothing but gradients (data parallel, DP)."""

import dataclasses

import torch.distributed as dist

from megahedge.utils.errors import InputError
from megahedge.utils.words import divisors, either


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """The group that holds one copy of the model between its ranks; what a layer needs to know of the job."""

    group: dist.ProcessGroup | None = None
    """Process group of the collectives; None where there is no torch.distributed (size 1)."""
    rank: int = 0
    """Position of this process in the group: which shard it holds."""
    size: int = 1
    """Number of shards."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """The job's TP × DP grid.  TP ranks are adjacent (rank = dp_rank * tp_size + tp_rank), so that they share a node."""

    tp_size: int = 1
    dp_size: int = 1
    tp_rank: int = 0
    dp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None

    @classmethod
    def single(cls) -> "Topology":
        """One process without torch.distributed."""
        return cls()

    @classmethod
    def create(cls, tp_size: int) -> "Topology":
        """Make the groups; every rank of the initialised world calls this at the same point.

        Raises InputError if tp_size does not divide the world size.
        """
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if tp_size < 1 or world_size % tp_size:
            fitting = either(divisors(world_size))
            raise InputError(f"tp_size={tp_size} does not divide the {world_size} processes of this job; use {fitting}")
        dp_size = world_size // tp_size
        tp_group = _own_group([[dp * tp_size + tp for tp in range(tp_size)] for dp in range(dp_size)], rank)
        dp_group = _own_group([[dp * tp_size + tp for dp in range(dp_size)] for tp in range(tp_size)], rank)
        return cls(tp_size, dp_size, rank % tp_size, rank // tp_size, tp_group, dp_group)

    @property
    def tensor_parallel(self) -> TensorParallel:
        """What the model's layers take."""
        return TensorParallel(self.tp_group, self.tp_rank, self.tp_size)

    @property
    def mpu(self) -> "ModelParallelUnit":
        """The object that `deepspeed.initialize(mpu=...)` asks for ranks and groups."""
        return ModelParallelUnit(self)


def _own_group(partition: list[list[int]], rank: int) -> dist.ProcessGroup:
    """Make a group of each list of ranks and return the one that holds `rank`; new_group is collective, so all ranks make all."""
    groups = [(ranks, dist.new_group(ranks)) for ranks in partition]
    return next(group for ranks, group in groups if rank in ranks)


class ModelParallelUnit:
    """Megatron's `mpu` interface as DeepSpeed 0.19 reads it.

    It must not grow an attribute `initialize_sequence_parallel`: DeepSpeed takes that as "no tensor parallelism here".
    """

    def __init__(self, topology: Topology):
        self._topology = topology

    def get_model_parallel_rank(self) -> int:
        return self._topology.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self._topology.tp_size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._topology.tp_group

    def get_data_parallel_rank(self) -> int:
        return self._topology.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self._topology.dp_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._topology.dp_group

    # DeepSpeed asks under Megatron's newer names first: there tensor parallelism is one kind of model parallelism, here the only one.
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Global rank of the first process of this TP group."""
        return self._topology.dp_rank * self._topology.tp_size
