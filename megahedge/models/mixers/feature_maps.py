"""Hedgehog feature maps: positive features of queries and keys, with which linear attention stands in for softmax attention."""

# b batch, t seq_len, h num_local_heads, p head_dim, n state_size = 2 p

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megahedge.config.model import ModelConfig
from megahedge.kernels import signed_softmax
from megahedge.parallel.collectives import copy_parameters_to_tp
from megahedge.parallel.sharding import ZEROS, Init, declare_parameter
from megahedge.parallel.topology import TensorParallel
from megahedge.utils.precision import full_precision, widen


def identity(shape: tuple[int, ...]) -> Tensor:
    """Ones on the diagonal of the last two dimensions."""
    return torch.eye(shape[-2], shape[-1]).expand(shape).clone()


class HedgehogMap(nn.Module):
    """φ(x) = softmax([W x + b, −(W x + b)]) over the FEATURE axis (Attention to Mamba, equation 6 and Listing 3), in fp32.

    One map for all heads of the layer, as in the paper, or one a head.  Starts at W = I, b = 0.
    """

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel):
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.per_head = config.mixer.feature_map_per_head
        self.scale = config.head_dim**-0.5 if config.mixer.feature_map_scale else 1.0
        heads, cut = ((config.num_heads,), 0) if self.per_head else ((), None)
        p = config.head_dim
        self.weight = declare_parameter((*heads, p, p), Init(pattern=identity), tensor_parallel, cut)
        self.bias = declare_parameter((*heads, p), ZEROS, tensor_parallel, cut, weight_decay=False)

    def forward(self, x: Tensor, *, stored: torch.dtype = torch.float32) -> Tensor:
        """x [b, t, h, p] → features [b, t, h, n], positive, of sum 1, fp32 at least but where `signed_softmax` stores them otherwise."""
        weight, bias = self.weight, self.bias
        if not self.per_head:
            weight, bias = copy_parameters_to_tp(weight, bias, tensor_parallel=self.tensor_parallel)
        with full_precision(x):
            x, weight, bias = widen(x, weight, bias)
            x = x * self.scale
            mapped = torch.einsum("bthi,hoi->btho", x, weight) + bias if self.per_head else F.linear(x, weight, bias)
            return signed_softmax(mapped, stored=stored)
