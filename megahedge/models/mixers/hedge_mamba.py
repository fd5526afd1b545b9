"""HedgeMamba: stage 2's mixer, Hedgehog attention with a decay, a short convolution and a gate, each of which starts as an identity."""

# b batch, t seq_len, h num_local_heads, p head_dim, n state_size = 2 p, k conv_kernel

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megahedge.config.model import ModelConfig
from megahedge.kernels import causal_conv, scan
from megahedge.models.context import SequenceContext
from megahedge.models.mixers.decay import DECAYS
from megahedge.models.mixers.hedgehog import HedgehogAttention
from megahedge.models.mixers.offsets import GATE_OFFSET
from megahedge.parallel.collectives import copy_parameters_to_tp
from megahedge.parallel.layers import ColumnParallelLinear
from megahedge.parallel.sharding import ZEROS, Init, declare_parameter
from megahedge.parallel.topology import TensorParallel
from megahedge.utils.precision import widen


class HedgeMamba(HedgehogAttention):
    """Listing 2: gate from the layer's input; convolution of the input; Δ, C, B and V from its output; scan; gate; out_proj.

    `bypass` is the control for the gate's parameters: a linear map of the layer's input, added to the scan's output.
    """

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel, layer_index: int):
        super().__init__(config, tensor_parallel, layer_index)
        mixer = config.mixer
        decay = DECAYS[mixer.decay]
        self.conv = CausalConv(config, tensor_parallel, Init(pattern=last_tap)) if mixer.conv_kernel else None
        self.decay = decay(config, tensor_parallel) if decay else None
        width = config.hidden_size
        self.bypass_proj = ColumnParallelLinear(width, width, tensor_parallel, std=0.0) if mixer.bypass else None
        self.gate_proj = ColumnParallelLinear(width, width, tensor_parallel, std=0.0) if mixer.gate else None

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        x = hidden if self.conv is None else self.conv(hidden, context.boundaries)
        mixed = self.state_space(x, *self.project(x), context)
        if self.bypass_proj is not None:
            mixed = mixed + self.by_head(self.bypass_proj(hidden))
        if self.gate_proj is not None:
            mixed = mixed * self.gate(hidden).to(mixed.dtype)
        return self.project_out(mixed)

    def state_space(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """The decaying scan (equations 2, 3, 9 to 11) of what was projected from x [b, t, hidden_size] → [b, t, h, p]."""
        if self.decay is None:
            return self.linear_attention(q, k, v, context)
        C, B = self.features(q, k, context)
        step, rate = self.decay(x)
        step = step.expand(*C.shape[:3], -1)  # heads that share it
        mixed, _ = scan(C, B, v, step, rate, boundaries=context.boundaries, eps=self.normalizer_eps, stats=context.stats)
        return mixed

    def gate(self, hidden: Tensor) -> Tensor:
        """SiLU(x W + b) (equation 13), [b, t, h, p], fp32 at least; 1 at W = 0, δ = 0."""
        (logits,) = widen(self.gate_proj(hidden))
        return self.by_head(F.silu(logits + GATE_OFFSET))

    def by_head(self, features: Tensor) -> Tensor:
        """[b, t, h · p] → [b, t, h, p]."""
        return features.unflatten(-1, (self.num_local_heads, self.head_dim))


class CausalConv(nn.Module):
    """Depthwise causal convolution over time (equation 12), without activation; `init` says how its taps start, its bias at 0."""

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel, init: Init):
        super().__init__()
        self.tensor_parallel = tensor_parallel
        shape = (config.hidden_size, config.mixer.conv_kernel)
        self.weight = declare_parameter(shape, init, tensor_parallel, weight_decay=False)
        self.bias = declare_parameter((config.hidden_size,), ZEROS, tensor_parallel)

    def forward(self, x: Tensor, boundaries: Tensor | None) -> Tensor:
        """x [b, t, hidden_size], past `copy_to_tp` → the same.

        Every rank convolves all channels, as all of them feed its heads; the gradients of the (k + 1) · hidden_size numbers here
        are partial sums and reduced here, against b · t · hidden_size for a copy behind.
        """
        weight, bias = copy_parameters_to_tp(self.weight, self.bias, tensor_parallel=self.tensor_parallel)
        return causal_conv(x, weight, bias, boundaries=boundaries)[0]


def last_tap(shape: tuple[int, ...]) -> Tensor:
    """[channels, k] zeros, and ones at the tap of the current token: the identity."""
    weight = torch.zeros(shape)
    weight[:, -1] = 1.0
    return weight
