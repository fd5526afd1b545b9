"""Layer normalisation with replicated parameters."""

import torch.nn.functional as F
from torch import Tensor, nn

from megahedge.parallel.collectives import copy_parameters_to_tp
from megahedge.parallel.sharding import ONES, ZEROS, declare_parameter
from megahedge.parallel.topology import TensorParallel


class LayerNorm(nn.Module):
    """(x − mean) / √(variance + eps) · weight + bias over the last dimension.

    `partial_gradients`: the output's gradient is a partial sum on each rank (the norm stands after `copy_to_tp`), so the gradients of
    weight and bias are summed over the group here.
    """

    def __init__(self, hidden_size: int, eps: float, tensor_parallel: TensorParallel, *, partial_gradients: bool = False):
        super().__init__()
        self.eps = eps
        self.tensor_parallel = tensor_parallel
        self.partial_gradients = partial_gradients
        self.weight = declare_parameter((hidden_size,), ONES, tensor_parallel)
        self.bias = declare_parameter((hidden_size,), ZEROS, tensor_parallel)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if self.partial_gradients:
            weight, bias = copy_parameters_to_tp(weight, bias, tensor_parallel=self.tensor_parallel)
        return F.layer_norm(x, (x.shape[-1],), weight, bias, self.eps)
