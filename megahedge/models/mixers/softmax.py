"""Causal softmax attention: the teacher's mixer."""

# b batch, t seq_len, h num_local_heads, p head_dim

import torch.nn.functional as F
from torch import Tensor

from megahedge.config.model import ModelConfig
from megahedge.models.mixers.base import Mixer
from megahedge.models.rotary import Rotary
from megahedge.parallel.layers import ColumnParallelLinear, RowParallelLinear, divide
from megahedge.parallel.topology import TensorParallel


class SoftmaxAttention(Mixer):
    """softmax(q kᵀ / √p) v per head, then out_proj.

    qkv_proj keeps GPT-NeoX's head-major rows [h, 3, p] (q, k, v of head 0, then of head 1 …), so that a rank's heads are one
    contiguous slice of the published tensor.
    """

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel, layer_index: int):
        super().__init__(config, tensor_parallel, layer_index)
        self.num_local_heads = divide("num_heads", config.num_heads, tensor_parallel)
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        self.qkv_proj = ColumnParallelLinear(hidden, 3 * hidden, tensor_parallel, std=config.initializer_range, bias=bias)
        self.out_proj = RowParallelLinear(hidden, hidden, tensor_parallel, std=config.residual_std, bias=bias)

    def forward(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.project(hidden, rotary)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)  # [b, h, t, p]
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def project(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, both rotated, and values of this rank's heads, each [b, t, h, p]."""
        q, k, v = self.qkv_proj(hidden).unflatten(-1, (self.num_local_heads, 3, self.head_dim)).unbind(-2)
        return rotary.rotate(q), rotary.rotate(k), v
