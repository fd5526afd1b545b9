"""What an exported model remembers from one call to the next, and how padding is kept out of it.

Padding.  Tokens whose attention_mask is 0 are no part of the text, wherever they stand: before the first layer the real tokens of a
row are moved to its start and the padding behind them, and what the layers make of them is moved back at the end.  So convolution,
rotary positions and chunks are those of the row alone, and what stands behind is kept out of the cache.  A column of padding has what
the last real token before it has: the next token of a row follows its last real one, also where padding ends the row.
"""

# b batch, t seq_len, s positions taken, d hidden_size, k conv_kernel

import torch
from torch import Tensor

from megahedge.kernels.problem import ScanState


class HedgeMambaCache:
    """All that the model remembers of the tokens so far: of a size that does not grow with them.

    `forward` moves it on, a single token's in the same memory, unless it is called with use_cache=False: then it goes on from a fork
    and leaves the cache as it is.
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
        self.last_hidden: Tensor | None = None
        """What the head reads of the last real token of each row, [b, d]; 0 where there was none."""
        self.num_positions = 0
        """Columns seen, padding included."""

    def fork(self) -> "HedgeMambaCache":
        """One with the same memory that goes its own way.  Only states are ever changed in place, so the other tensors are shared."""
        other = HedgeMambaCache(len(self.states))
        other.conv_tails = self.conv_tails[:]
        other.states = [state and ScanState(state.numerator.clone(), state.denominator.clone()) for state in self.states]
        other.num_tokens, other.num_positions, other.last_hidden = self.num_tokens, self.num_positions, self.last_hidden
        return other

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, padding included."""
        return self.num_positions

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on from what was row beam_idx[i]."""

        def select(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.index_select(0, beam_idx.to(x.device))

        self.num_tokens, self.last_hidden = select(self.num_tokens), select(self.last_hidden)
        self.conv_tails = [select(tail) for tail in self.conv_tails]
        self.states = [state and ScanState(select(state.numerator), select(state.denominator)) for state in self.states]

    def advance(self, hidden: Tensor, num_tokens: Tensor) -> None:
        """Count the columns of hidden [b, t, d], what the head reads, and in each row the real tokens among them, [b]."""
        self.num_positions += hidden.shape[1]
        self.num_tokens = num_tokens if self.num_tokens is None else self.num_tokens + num_tokens
        self.last_hidden = hidden[:, -1].clone()  # a view would keep the others


class Packing:
    """Moves the real tokens of each row to its start, and back.  mask [b, t]: 0 where there is padding."""

    def __init__(self, mask: Tensor):
        mask = mask.bool()
        self.lengths = mask.sum(dim=1)
        self._order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
        self._last_real = mask.cumsum(dim=1) - 1
        """For each column the place of the last real token up to it; -1 where there is none."""

    @classmethod
    def of(cls, attention_mask: Tensor | None, batch: int, seq_len: int) -> "Packing | None":
        """None where no token of the last `seq_len` columns is padding: those before are in the cache."""
        if attention_mask is None:
            return None
        if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < seq_len:
            found = list(attention_mask.shape)
            raise ValueError(f"attention_mask is [b, tokens so far], {batch} rows and at least {seq_len} columns, not {found}")
        mask = attention_mask[:, -seq_len:]
        return None if bool(mask.all()) else cls(mask)

    def pack(self, x: Tensor) -> Tensor:
        """x [b, t, d], the real tokens first."""
        return take(x, self._order)

    def unpack(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        """The inverse of `pack`.  A column of padding has the last real token before it or, where there is none, `before` [b, d] or 0."""
        unpacked, leading = take(x, self._last_real.clamp(min=0)), (self._last_real < 0).unsqueeze(-1).to(x.device)
        return unpacked.masked_fill(leading, 0) if before is None else torch.where(leading, before.unsqueeze(1), unpacked)


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [b, t, d] at the positions index [b, s] of its rows: [b, s, d]."""
    return x.gather(1, index.to(x.device).unsqueeze(-1).expand(-1, -1, x.shape[-1]))
