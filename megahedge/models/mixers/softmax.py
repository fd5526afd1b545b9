"""Causal softmax attention: the teacher's mixer."""

# b batch, t seq_len, h num_local_heads, p head_dim

import torch.nn.functional as F
from torch import Tensor

from megahedge.config.model import ModelConfig
from megahedge.models.context import SequenceContext
from megahedge.models.mixers.base import Mixer
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

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        return self.project_out(softmax_attention(*self.project(hidden), context))

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads, not yet rotated, each [b, t, h, p]."""
        return self.qkv_proj(hidden).unflatten(-1, (self.num_local_heads, 3, self.head_dim)).unbind(-2)

    def project_out(self, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """mixed [b, t, h, p] → what `forward` returns."""
        return self.out_proj(mixed.flatten(2))


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
    """softmax(q kᵀ / √p) v, causal and within documents, of q and k as projected; all [b, t, h, p]."""
    q, k = context.rotary.rotate(q), context.rotary.rotate(k)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    mask = context.attention_mask()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2)
