"""What an exported model remembers from one call to the next, and how padding is kept out of it.

Padding.  Tokens whose attention_mask is 0 are no part of the text, wherever they stand: before the first layer the real tokens of a
row are moved to its start and the padding behind them, and what the layers make of them is moved back at the end.  So convolution,
rotary positions and chunks are those of the row alone, and what stands behind is kept out of the cache.
"""

# b batch, t seq_len, s positions taken, d hidden_size, k conv_kernel

import torch
from torch import Tensor

from megahedge.kernels.problem import ScanState


class HedgeMambaCache:
    """All that the model remembers of the tokens so far: of a size that does not grow with them.

    `forward` replaces what is in it, unless it is called with use_cache=False: then it goes on from the cache and leaves it as it is.
    """

    is_compileable = False
    is_croppable = False
    is_linear = (False,)
    """It knows how many positions it has seen, so `generate` may ask it what is new in a longer input."""

    def __init__(self, num_layers: int):
        self.conv_tails: list[Tensor | None] = [None] * num_layers
        """By layer the last k - 1 inputs of the convolution, [b, k - 1, d]."""
        self.states: list[ScanState | None] = [None] * num_layers
        """By layer the scan's numerator and denominator, fp32 at least."""
        self.num_tokens: Tensor | None = None
        """Real tokens seen in each row, [b]."""
        self.num_positions = 0
        """Columns seen, padding included."""

    def fork(self) -> "HedgeMambaCache":
        """One with the same memory that goes its own way.  Tensors are shared: none is ever changed in place."""
        other = HedgeMambaCache(len(self.states))
        other.conv_tails, other.states = self.conv_tails[:], self.states[:]
        other.num_tokens, other.num_positions = self.num_tokens, self.num_positions
        return other

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, padding included."""
        return self.num_positions

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on from what was row beam_idx[i]."""

        def select(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.index_select(0, beam_idx.to(x.device))

        self.num_tokens = select(self.num_tokens)
        self.conv_tails = [select(tail) for tail in self.conv_tails]
        self.states = [state and ScanState(select(state.numerator), select(state.denominator)) for state in self.states]

    def advance(self, num_columns: int, num_tokens: Tensor) -> None:
        """Count columns and, in each row, the real tokens among them, [b]."""
        self.num_positions += num_columns
        self.num_tokens = num_tokens if self.num_tokens is None else self.num_tokens + num_tokens


class Packing:
    """Moves the real tokens of each row to its start, and back.  mask [b, t]: 0 where there is padding."""

    def __init__(self, mask: Tensor):
        mask = mask.bool()
        self.lengths = mask.sum(dim=1)
        self._order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
        self._inverse = torch.argsort(self._order, dim=1)

    @classmethod
    def of(cls, attention_mask: Tensor | None, seq_len: int) -> "Packing | None":
        """None where no token of the last `seq_len` columns is padding: those before are in the cache."""
        if attention_mask is None:
            return None
        if attention_mask.dim() != 2 or attention_mask.shape[1] < seq_len:
            raise ValueError(f"attention_mask is [b, tokens so far], at least {seq_len} columns, not {list(attention_mask.shape)}")
        mask = attention_mask[:, -seq_len:]
        return None if bool(mask.all()) else cls(mask)

    def pack(self, x: Tensor) -> Tensor:
        """x [b, t, d], the real tokens first."""
        return take(x, self._order)

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of `pack`."""
        return take(x, self._inverse)


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [b, t, d] at the positions index [b, s] of its rows: [b, s, d]."""
    return x.gather(1, index.to(x.device).unsqueeze(-1).expand(-1, -1, x.shape[-1]))
