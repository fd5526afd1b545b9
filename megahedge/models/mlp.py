"""The feed-forward half of a block."""

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megahedge.config.model import ModelConfig
from megahedge.parallel.layers import ColumnParallelLinear, RowParallelLinear, divide
from megahedge.parallel.topology import TensorParallel

_gelu_tanh = functools.partial(F.gelu, approximate="tanh")

# Hugging Face's names; three of them are one function, the tanh approximation
ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
}


class MLP(nn.Module):
    """down_proj(activation(up_proj(x))), its inner width cut over the ranks."""

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel):
        super().__init__()
        divide("intermediate_size", config.intermediate_size, tensor_parallel)
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.up_proj = ColumnParallelLinear(config.hidden_size, config.intermediate_size, tensor_parallel, std=config.initializer_range)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, tensor_parallel, std=config.residual_std)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """hidden [b, t, hidden_size], past `copy_to_tp` → this rank's partial sum of the output, and the output's replicated bias."""
        return self.down_proj(self.activation(self.up_proj(hidden)))
