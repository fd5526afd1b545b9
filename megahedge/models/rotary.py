"""Rotary position embedding (RoPE, arXiv 2104.09864) in GPT-NeoX's form: the first rotary_dim features of a head, halves paired."""

# b batch, t seq_len, h num_local_heads, p head_dim, r rotary_dim

import dataclasses

import torch
from torch import Tensor

from megahedge.config.model import ModelConfig


@dataclasses.dataclass(frozen=True)
class Rotary:
    """cos and sin of every position's angles, fp32, [t, 1, r / 2] or [b, t, 1, r / 2].

    Computed from the positions in each forward and never kept as a module's buffer: DeepSpeed casts buffers to bf16, which holds
    no position beyond 256 exactly.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, config: ModelConfig) -> "Rotary":
        """positions [t] or [b, t], counted from 0."""
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=positions.device) / max(config.rotary_dim, 1)
        angles = positions.unsqueeze(-1).float() * (1.0 / config.rotary_base**exponents)
        angles = angles.unsqueeze(-2)
        return cls(angles.cos(), angles.sin())

    def rotate(self, x: Tensor) -> Tensor:
        """x [b, t, h, p] with its first r features rotated, in x's dtype; the arithmetic is fp32 at least."""
        half = self.cos.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat((*(part.to(x.dtype) for part in rotated), rest), dim=-1)
