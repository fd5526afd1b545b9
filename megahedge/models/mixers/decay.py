"""How fast a state forgets: rates λ ≥ 0 and steps Δ > 0 of the scan, Λ_t = exp(−λ Δ_t) (Attention to Mamba, equation 11).

All start as identities: λ = 0, and Δ = SoftPlus(SoftPlus⁻¹(1) + δ) with δ = 0, so Δ = 1 exactly as in attention without decay.
The constant stays outside the parameter, because bf16 cannot hold it.
"""

# b batch, t seq_len, h num_local_heads (1 where the heads share), p head_dim, n state_size, r decay_rank

import abc

import torch.nn.functional as F
from torch import Tensor, cat, nn

from megahedge.config.model import ModelConfig
from megahedge.models.mixers.offsets import STEP_OFFSET
from megahedge.parallel.collectives import copy_parameters_to_tp
from megahedge.parallel.layers import divide
from megahedge.parallel.sharding import ZEROS, Init, declare_parameter
from megahedge.parallel.topology import TensorParallel
from megahedge.utils.precision import full_precision, widen


class Decay(nn.Module, abc.ABC):
    """λ and Δ of one layer.  A structure is a subclass that says what λ varies over; what Δ varies over is an option."""

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel):
        super().__init__()
        mixer = config.mixer
        features = config.head_dim if mixer.decay_tie_signs else 2 * config.head_dim
        self.tie_rate = mixer.decay_tie_signs and self.rate_shape(features, config.head_dim) != ()
        self.tie_step = mixer.decay_tie_signs and mixer.decay_step == "state"
        self.rate = Rate(self.rate_shape(features, config.head_dim), config, tensor_parallel)
        width = {"head": 1, "state": features, "channel": config.head_dim}[mixer.decay_step]
        down = Init(std=config.initializer_range)
        self.step = Step(width, config, tensor_parallel, per_head=mixer.decay_per_head, down=down)

    @staticmethod
    @abc.abstractmethod
    def rate_shape(features: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one head's λ; `features` is the state size, or half of it where a feature and its negative share."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [b, t, hidden_size], past `copy_to_tp` → Δ [b, t, h, 1 | n | p] and λ [h], [h, n] or [h, n, p], fp32 at least."""
        step, rate = self.step(x), self.rate()
        # the features are [W x + b, −(W x + b)]: a feature's negative lies half the state further
        return cat((step, step), -1) if self.tie_step else step, cat((rate, rate), 1) if self.tie_rate else rate


class HeadDecay(Decay):
    """One rate a head (Mamba-2's structure)."""

    @staticmethod
    def rate_shape(features, head_dim):
        return ()


class StateDecay(Decay):
    """One rate a feature (gated linear attention's structure)."""

    @staticmethod
    def rate_shape(features, head_dim):
        return (features,)


class ChannelDecay(Decay):
    """One rate a feature and output channel (Mamba's structure, and the paper's)."""

    @staticmethod
    def rate_shape(features, head_dim):
        return (features, head_dim)


DECAYS: dict[str, type[Decay] | None] = {"none": None, "head": HeadDecay, "state": StateDecay, "channel": ChannelDecay}


class Rate(nn.Module):
    """λ [h, …], of each head or (h = 1) of all heads.

    The optimizer keeps it from falling below 0: it projects after each update, so that the gradient flows in full at 0 and nothing
    depends on how a batch was cut.
    """

    def __init__(self, shape: tuple[int, ...], config: ModelConfig, tensor_parallel: TensorParallel):
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.per_head = config.mixer.decay_per_head
        heads, cut = (config.num_heads, 0) if self.per_head else (1, None)
        self.weight = declare_parameter((heads, *shape), ZEROS, tensor_parallel, cut, weight_decay=False)
        self.weight.lower_bound = 0.0

    def forward(self) -> Tensor:
        weight = self.weight
        if not self.per_head:
            (weight,) = copy_parameters_to_tp(weight, tensor_parallel=self.tensor_parallel)
        return widen(weight)[0]


def step_rank(config: ModelConfig) -> int:
    """Width between W_d and W_u: `decay_rank`, or Mamba's sixteenth of hidden_size."""
    return config.mixer.decay_rank or max(1, config.hidden_size // 16)


class Step(nn.Module):
    """Δ = SoftPlus((x W_d + b_d) W_u + b_u) [b, t, h, width], of each head or (h = 1) of all heads.

    W_d brings x down to `decay_rank` numbers, which all heads share; where one number a head is wanted, W_u alone makes it, as W_d
    would be wider than what it feeds.  `down`, `up` and `up_bias` say how W_d, W_u and b_u start; b_u has STEP_OFFSET on top, and at
    the defaults Δ = 1.
    """

    def __init__(
        self,
        width: int,
        config: ModelConfig,
        tensor_parallel: TensorParallel,
        *,
        per_head: bool,
        down: Init,
        up: Init = ZEROS,
        up_bias: Init = ZEROS,
    ):
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.width = width
        heads, cut = (config.num_heads, 0) if per_head else (1, None)
        if per_head:
            divide("num_heads", heads, tensor_parallel)
        inner = config.hidden_size
        self.down_weight = self.down_bias = None
        if width > 1:
            inner = step_rank(config)
            self.down_weight = declare_parameter((inner, config.hidden_size), down, tensor_parallel, weight_decay=False)
            self.down_bias = declare_parameter((inner,), ZEROS, tensor_parallel)
        self.up_weight = declare_parameter((heads * width, inner), up, tensor_parallel, cut, weight_decay=False)
        self.up_bias = declare_parameter((heads * width,), up_bias, tensor_parallel, cut)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, t, hidden_size], past `copy_to_tp`.  The wide product x W_d has x's precision, the rest is fp32 at least."""
        down_weight, down_bias, up_weight, up_bias = self._parameters_of_partial_gradients()
        if down_weight is not None:
            x = F.linear(x, down_weight, down_bias)
        with full_precision(x):
            x, up_weight, up_bias = widen(x, up_weight, up_bias)
            return F.softplus(F.linear(x, up_weight, up_bias) + STEP_OFFSET).unflatten(-1, (-1, self.width))

    def _parameters_of_partial_gradients(self) -> tuple[Tensor | None, ...]:
        """All parameters; those that every rank holds whole see the gradients of its own heads only, which are summed in one reduce.

        For W_d that is hidden_size · r numbers, against b · t · r for a copy behind it.
        """
        names = ("down_weight", "down_bias", "up_weight", "up_bias")
        parameters = {name: getattr(self, name) for name in names}
        shared = [name for name in names if parameters[name] is not None and parameters[name].shard_spec.dim is None]
        if shared:
            copies = copy_parameters_to_tp(*(parameters[name] for name in shared), tensor_parallel=self.tensor_parallel)
            parameters |= dict(zip(shared, copies, strict=True))
        return tuple(parameters.values())
