"""What every token mixer is to its block."""

# b batch, t seq_len, h num_local_heads, p head_dim

import abc

from torch import Tensor, nn

from megahedge.config.model import ModelConfig
from megahedge.models.context import SequenceContext
from megahedge.parallel.topology import TensorParallel


class Mixer(nn.Module, abc.ABC):
    """Mixes information between positions; heads are cut over the TP group.

    The input comes replicated and past `copy_to_tp`: the gradient that a mixer returns for it may be a partial sum, and the block
    sums it.  A parameter that a mixer replicates therefore goes through `copy_parameters_to_tp`, unless the mixer itself puts a
    copy after it.

    Parameters live in submodules that are called, none in the mixer itself: ZeRO-3 gathers what a module owns when it is called,
    and a mixer's steps are called one by one where teacher and student share some of them.
    """

    @abc.abstractmethod
    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel, layer_index: int):
        """Raises InputError if the TP size does not divide the heads."""
        super().__init__()

    @abc.abstractmethod
    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        """hidden [b, t, hidden_size] → this rank's partial sum of the output, and the output's replicated bias or None.

        The block sums over the group, together with the MLP's partial sum where it can, and adds the bias after.
        """
