"""The naive baseline "straight to Mamba": Mamba's own initialisation in place of attention, and nothing of what attention has learnt."""

# b batch, t seq_len, h num_local_heads, p head_dim, n STATE_SIZE

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megahedge.config.model import ModelConfig
from megahedge.kernels import scan
from megahedge.models.context import SequenceContext
from megahedge.models.mixers.base import Mixer
from megahedge.models.mixers.decay import Step, step_rank
from megahedge.models.mixers.hedge_mamba import CausalConv
from megahedge.models.mixers.offsets import STEP_OFFSET
from megahedge.parallel.layers import ColumnParallelLinear, RowParallelLinear, divide
from megahedge.parallel.sharding import ONES, Init, declare_parameter
from megahedge.parallel.topology import TensorParallel
from megahedge.utils.precision import widen

STATE_SIZE = 16
"""States of a channel: Mamba's d_state."""
STEP_RANGE = (1e-3, 1e-1)
"""What the steps Δ start from: Mamba's dt_min and dt_max."""


class Mamba(Mixer):
    """Listing 2's wiring with the parameters of Mamba (arXiv 2312.00752): y = scan(C, B, x; Δ, λ) + D x, times SiLU(z), through y_proj.

    x, B, C and Δ come from SiLU(convolution of the layer's input), z from that input itself.  There are neither feature maps nor a
    normaliser nor RoPE, and no part starts as an identity.  As in HedgeMamba each head has B and C of its own, so that heads shard,
    and the width is the model's, not Mamba's two times as much.  No projection has a bias, and no parameter the name of one of the
    teacher's, of which it would else get the values.

    Matrices start normal, with the variance of the uniform distribution that Mamba draws them from.
    """

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel, layer_index: int):
        super().__init__(config, tensor_parallel, layer_index)
        self.num_local_heads = divide("num_heads", config.num_heads, tensor_parallel)
        width, std = config.hidden_size, uniform_std(config.hidden_size)

        def project(features: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(width, features, tensor_parallel, std=std, bias=False)

        taps = config.mixer.conv_kernel
        self.conv = CausalConv(config, tensor_parallel, Init(uniform_std(taps))) if taps else None
        self.x_proj, self.z_proj = project(width), project(width)
        self.B_proj, self.C_proj = (project(config.num_heads * STATE_SIZE) for _ in "BC")
        self.step = Step(
            config.head_dim,
            config,
            tensor_parallel,
            per_head=True,
            down=Init(std),
            up=Init(uniform_std(step_rank(config))),
            up_bias=Init(pattern=functools.partial(spread_steps, config.head_dim)),
        )
        self.rate = LogRate(config, tensor_parallel)
        self.skip = Skip(config, tensor_parallel)
        residuals = 2 * config.num_layers  # Mamba divides what writes into the residual stream by the root of their number
        self.y_proj = RowParallelLinear(width, width, tensor_parallel, std=std / math.sqrt(residuals), bias=False)

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        filtered = F.silu(hidden if self.conv is None else self.conv(hidden, context.boundaries))
        x, B, C = (self.by_head(project(filtered)) for project in (self.x_proj, self.B_proj, self.C_proj))
        dynamics = {"step": self.step(filtered), "rate": self.rate(), "step_axis": "channel"}
        mixed, _ = scan(C, B, x, **dynamics, normalize=False, boundaries=context.boundaries)
        mixed, z = widen(mixed, self.by_head(self.z_proj(hidden)))
        gated = (mixed + self.skip(x)) * F.silu(z)
        return self.y_proj(gated.to(x.dtype).flatten(2))

    def by_head(self, features: Tensor) -> Tensor:
        """[b, t, h · m] → [b, t, h, m]."""
        return features.unflatten(-1, (self.num_local_heads, -1))


class LogRate(nn.Module):
    """λ = exp(log_rate) [h, n, p], fp32 at least; starts at 1 … n in every channel (S4D-Real)."""

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel):
        super().__init__()
        shape = (config.num_heads, STATE_SIZE, config.head_dim)
        self.log_rate = declare_parameter(shape, Init(pattern=log_of_state_numbers), tensor_parallel, shard_dim=0, weight_decay=False)

    def forward(self) -> Tensor:
        return widen(self.log_rate)[0].exp()


class Skip(nn.Module):
    """D x, fp32 at least, with a number D for each channel that starts at 1."""

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel):
        super().__init__()
        self.weight = declare_parameter((config.num_heads, config.head_dim), ONES, tensor_parallel, shard_dim=0, weight_decay=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, t, h, p] → the same."""
        weight, x = widen(self.weight, x)
        return weight * x


def uniform_std(fan_in: int) -> float:
    """Standard deviation of uniform(±1/√fan_in), from which torch draws the weights of linear maps and convolutions."""
    return 1 / math.sqrt(3 * fan_in)


def spread_steps(head_dim: int, shape: tuple[int, ...]) -> Tensor:
    """Biases [h · p] at which the steps Δ of each head's channels are spread over STEP_RANGE, evenly in their logarithm."""
    steps = torch.logspace(*map(math.log10, STEP_RANGE), head_dim, dtype=torch.float64)
    softplus_inverse = steps + torch.log(-torch.expm1(-steps))
    return (softplus_inverse - STEP_OFFSET).float().repeat(shape[0] // head_dim)


def log_of_state_numbers(shape: tuple[int, ...]) -> Tensor:
    """[h, n, p]: log 1 … log n along n."""
    return torch.arange(1.0, shape[1] + 1).log().unsqueeze(-1).expand(shape).clone()
