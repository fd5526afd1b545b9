"""What every mixer of a forward pass has to know of the sequence's positions."""

# b batch, t seq_len

import dataclasses

import torch
from torch import Tensor

from megahedge.config.model import ModelConfig
from megahedge.kernels import DenominatorStats
from megahedge.models.rotary import Rotary


@dataclasses.dataclass(frozen=True)
class SequenceContext:
    """Made once a forward, read by every layer."""

    rotary: Rotary
    boundaries: Tensor | None = None
    """[b, t] bool, true where a document begins of which the tokens before are no part; None where all of a row is one document."""
    stats: DenominatorStats | None = None
    """Counts the normalisers of all scans, where somebody wants to know."""

    @classmethod
    def of(
        cls, tokens: Tensor, config: ModelConfig, boundaries: Tensor | None = None, stats: DenominatorStats | None = None
    ) -> "SequenceContext":
        """Positions count from the start of each document of tokens [b, t]."""
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        if boundaries is not None:
            starts = torch.where(boundaries, positions, 0).cummax(-1).values
            positions = positions - starts
        return cls(Rotary.of(positions, config), boundaries, stats)

    def attention_mask(self) -> Tensor | None:
        """[b, 1, t, t] bool, true where the row's token may see the column's; None where plain causality says it all."""
        if self.boundaries is None:
            return None
        document = self.boundaries.cumsum(-1)
        causal = torch.ones(document.shape[-1], document.shape[-1], dtype=torch.bool, device=document.device).tril()
        return ((document.unsqueeze(-1) == document.unsqueeze(-2)) & causal).unsqueeze(1)
