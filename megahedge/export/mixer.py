"""What stands in place of attention in an exported model, with the parameters of the trainer's mixers under the same names.

Two biases are stored as offsets from constants that bf16 cannot hold: the gate's from GATE_OFFSET, that of the step Δ from STEP_OFFSET.
"""

# b batch, t seq_len, d hidden_size, h num_attention_heads, p head_dim, n state_size = 2 p, k conv_kernel, r decay_rank

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # whose functions leave parameters alone that come from a file

from megahedge.export.cache import HedgeMambaCache, take
from megahedge.export.configuration_hedge_mamba import HedgeMambaConfig
from megahedge.kernels.causal_conv import causal_conv
from megahedge.kernels.scan import scan, scan_step
from megahedge.models.mixers.offsets import GATE_OFFSET, STEP_OFFSET
from megahedge.utils.precision import full_precision, widen


def rotary_angles(positions: Tensor, config: HedgeMambaConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32, [t, 1, rotary_dim / 2] or [b, t, 1, rotary_dim / 2], of positions [t] or [b, t]."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=positions.device) / max(config.rotary_dim, 1)
    angles = (positions.unsqueeze(-1).float() * (1.0 / config.rotary_emb_base**exponents)).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """x [b, t, h, p] with its first features rotated, halves paired; the arithmetic is fp32 at least."""
    cos, sin = rotary
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*(part.to(x.dtype) for part in rotated), rest), dim=-1)


class HedgehogMap(nn.Module):
    """φ(x) = softmax([W x + b, −(W x + b)]) over the features, in fp32; one map for all heads, or one a head."""

    def __init__(self, config: HedgeMambaConfig):
        super().__init__()
        heads, p = (config.num_attention_heads,) if config.feature_map_per_head else (), config.head_dim
        self.scale = p**-0.5 if config.feature_map_scale else 1.0
        self.weight = nn.Parameter(torch.empty(*heads, p, p))
        self.bias = nn.Parameter(torch.empty(*heads, p))

    def reset_parameters(self) -> None:
        """W = I, b = 0."""
        init.copy_(self.weight, torch.eye(self.weight.shape[-1]).expand_as(self.weight))
        init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, t, h, p] → [b, t, h, n], positive."""
        with full_precision(x):
            x, weight, bias = widen(x, self.weight, self.bias)
            x = x * self.scale
            mapped = torch.einsum("bthi,hoi->btho", x, weight) + bias if weight.dim() == 3 else F.linear(x, weight, bias)
            return torch.cat((mapped, -mapped), dim=-1).softmax(-1)


class CausalConv(nn.Module):
    """Depthwise causal convolution over time; weight [d, k], its last tap on the current token."""

    def __init__(self, config: HedgeMambaConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size, config.conv_kernel))
        self.bias = nn.Parameter(torch.empty(config.hidden_size))

    def reset_parameters(self) -> None:
        """The identity."""
        init.copy_(self.weight, torch.eye(self.weight.shape[1])[-1].expand_as(self.weight))
        init.zeros_(self.bias)

    def forward(self, x: Tensor, tail: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [b, t, d] after inputs tail [b, k - 1, d] → the output and the new tail; lengths [b]: real tokens, None for all."""
        y, last = causal_conv(x, self.weight, self.bias, initial=tail)
        if lengths is None:
            return y, last
        num_kept = self.weight.shape[1] - 1
        before = x.new_zeros(x.shape[0], num_kept, x.shape[2]) if tail is None else tail.to(x.dtype)
        return y, take(torch.cat((before, x), dim=1), lengths.unsqueeze(1) + torch.arange(num_kept, device=lengths.device))


class Rate(nn.Module):
    """λ ≥ 0 [h, …], of each head or (h = 1) of all.

    A value that an optimizer has brought below 0 counts as 0 and still has its gradient, so that it can come back.
    """

    def __init__(self, config: HedgeMambaConfig):
        super().__init__()
        features = config.head_dim if config.decay_tie_signs else 2 * config.head_dim
        shape = {"head": (), "state": (features,), "channel": (features, config.head_dim)}[config.decay]
        self.tied = config.decay_tie_signs and config.decay != "head"
        self.start = config.decay_init
        self.weight = nn.Parameter(torch.empty(config.num_attention_heads if config.decay_per_head else 1, *shape))

    def reset_parameters(self) -> None:
        """λ = decay_init."""
        init.constant_(self.weight, self.start)

    def forward(self) -> Tensor:
        """[h], [h, n] or [h, n, p]."""
        (rate,) = widen(self.weight)
        rate = rate + (rate.clamp(min=0) - rate).detach()
        return torch.cat((rate, rate), dim=1) if self.tied else rate


class Step(nn.Module):
    """Δ = SoftPlus((x W_d + b_d) W_u + b_u + STEP_OFFSET), of each head or (h = 1) of all; W_d only where Δ is wider than 1."""

    def __init__(self, config: HedgeMambaConfig):
        super().__init__()
        features = config.head_dim if config.decay_tie_signs else 2 * config.head_dim
        self.width = {"head": 1, "state": features, "channel": config.head_dim}[config.decay_step]
        self.tied = config.decay_tie_signs and config.decay_step == "state"
        heads = config.num_attention_heads if config.decay_per_head else 1
        inner = config.hidden_size
        self.down_weight = self.down_bias = None
        if self.width > 1:
            inner = config.decay_rank or max(1, config.hidden_size // 16)
            self.down_weight = nn.Parameter(torch.empty(inner, config.hidden_size))
            self.down_bias = nn.Parameter(torch.empty(inner))
        self.up_weight = nn.Parameter(torch.empty(heads * self.width, inner))
        self.up_bias = nn.Parameter(torch.empty(heads * self.width))

    def reset_parameters(self, std: float) -> None:
        """Δ = 1."""
        if self.down_weight is not None:
            init.normal_(self.down_weight, std=std)
            init.zeros_(self.down_bias)
        init.zeros_(self.up_weight)
        init.zeros_(self.up_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, t, d] → [b, t, h, 1 | n | p].  The wide product x W_d has x's precision, the rest is fp32 at least."""
        if self.down_weight is not None:
            x = F.linear(x, self.down_weight, self.down_bias)
        with full_precision(x):
            x, up_weight, up_bias = widen(x, self.up_weight, self.up_bias)
            step = F.softplus(F.linear(x, up_weight, up_bias) + STEP_OFFSET).unflatten(-1, (-1, self.width))
        return torch.cat((step, step), dim=-1) if self.tied else step


class Decay(nn.Module):
    """What the scan forgets by, Λ_t = exp(−λ Δ_t)."""

    def __init__(self, config: HedgeMambaConfig):
        super().__init__()
        self.rate = Rate(config)
        self.step = Step(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [b, t, d] → Δ and λ."""
        return self.step(x), self.rate()


class Gate(nn.Linear):
    """SiLU(x W + b + GATE_OFFSET), fp32 at least."""

    def reset_parameters(self) -> None:
        """1 for every x."""
        init.zeros_(self.weight)
        init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, t, d] → the same."""
        (logits,) = widen(super().forward(x))
        return F.silu(logits + GATE_OFFSET)


class Bypass(nn.Linear):
    """x W + b, which is added to the scan's output."""

    def reset_parameters(self) -> None:
        """0 for every x."""
        init.zeros_(self.weight)
        init.zeros_(self.bias)


class HedgeMambaMixer(nn.Module):
    """What stands in place of attention: y = φ(q) h / φ(q) z, where h and z are sums of φ(k) ⊗ v and φ(k) that decay.

    query_key_value is head-major, [h, 3, p].
    """

    def __init__(self, config: HedgeMambaConfig, layer_index: int):
        super().__init__()
        d = config.hidden_size
        self.layer_index = layer_index
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.rotates_features = config.rope_position == "after"
        self.normalizer_eps = config.normalizer_eps
        self.query_key_value = nn.Linear(d, 3 * d, bias=config.attention_bias)
        self.dense = nn.Linear(d, d, bias=config.attention_bias)
        self.query_map, self.key_map = HedgehogMap(config), HedgehogMap(config)
        self.conv = CausalConv(config) if config.conv_kernel else None
        self.decay = Decay(config) if config.decay != "none" else None
        self.bypass_proj = Bypass(d, d) if config.bypass else None
        self.gate_proj = Gate(d, d) if config.gate else None

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], lengths: Tensor | None, cache: HedgeMambaCache | None) -> Tensor:
        """hidden [b, t, d] → the same.  lengths [b]: real tokens of each row, at its start; None where all are."""
        x = hidden if self.conv is None else self._convolve(hidden, lengths, cache)
        q, k, v = self.query_key_value(x).unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(-2)
        C, B = self._features(q, k, rotary)  # [b, t, h, n]
        step, rate = (None, None) if self.decay is None else self.decay(x)
        if step is not None:
            step = step.expand(*C.shape[:3], -1)
        if lengths is not None:  # what follows the real tokens adds nothing and lets nothing decay
            real = (torch.arange(x.shape[1], device=lengths.device) < lengths.unsqueeze(1))[..., None, None]
            B, step = B * real, None if step is None else step * real
        mixed = self._scan(C, B, v, step, rate, cache).flatten(2)
        if self.bypass_proj is not None:
            mixed = mixed + self.bypass_proj(hidden)
        if self.gate_proj is not None:
            mixed = mixed * self.gate_proj(hidden).to(mixed.dtype)
        return self.dense(mixed)

    def _convolve(self, hidden: Tensor, lengths: Tensor | None, cache: HedgeMambaCache | None) -> Tensor:
        tail = None if cache is None else cache.conv_tails[self.layer_index]
        x, tail = self.conv(hidden, tail, lengths)
        if cache is not None:
            cache.conv_tails[self.layer_index] = tail
        return x

    def _features(self, q: Tensor, k: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self.rotates_features:
            return rotate(self.query_map(q), rotary), rotate(self.key_map(k), rotary)
        return self.query_map(rotate(q, rotary)), self.key_map(rotate(k, rotary))

    def _scan(self, C, B, v, step, rate, cache: HedgeMambaCache | None) -> Tensor:
        """A single token by the recurrence, several by chunks."""
        state = None if cache is None else cache.states[self.layer_index]
        if C.shape[1] == 1:
            inputs = (None if x is None else x.squeeze(1) for x in (C, B, v, step))
            mixed, state = scan_step(*inputs, rate, state, eps=self.normalizer_eps, in_place=not torch.is_grad_enabled())
            mixed = mixed.unsqueeze(1)
        else:
            mixed, state = scan(C, B, v, step, rate, initial_state=state, eps=self.normalizer_eps)
        if cache is not None:
            cache.states[self.layer_index] = state
        return mixed
