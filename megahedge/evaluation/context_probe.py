"""How much a model uses distant context: the loss of a window's second half, with its first half as it is and with it shuffled.

Shuffling keeps which tokens occur and destroys their order, so the difference is what the model gains from more than a bag of words.
"""

# b windows in a batch, t seq_len

import dataclasses
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from megahedge.data.loader import Batch
from megahedge.evaluation.perplexity import TokenLosses
from megahedge.utils.errors import InputError
from megahedge.utils.labels import IGNORE_INDEX


@dataclasses.dataclass(frozen=True)
class ContextProbe:
    """Mean losses in nats per token of the second halves, each window counted equally."""

    intact: float
    """With the first half as it is."""
    shuffled: float
    """With the first half's tokens in random order."""
    standard_error: float
    """Of the difference, over windows."""
    windows: int

    @property
    def difference(self) -> float:
        """What the order of the first half is worth to the second, in nats per token."""
        return self.shuffled - self.intact


@torch.no_grad()
def probe_context(token_losses: TokenLosses, batches: Iterable[Batch], seed: int, device: torch.device | str = "cpu") -> ContextProbe:
    """Score each whole window of `batches` twice; windows with masked labels are passed over.

    The second half are positions t // 2 … t − 1: their inputs and labels are the same both times, so a model that looks at nothing but
    the current token shows a difference of exactly 0.  The order is drawn from (seed, window), whatever the batch size.
    Raises InputError for windows of one token, and for fewer than two windows, which have no standard error.
    """
    pairs = []  # [b, 2]: mean loss of the second half, intact and shuffled
    for batch in batches:
        half = batch.tokens.shape[1] // 2
        if half == 0:
            raise InputError("--context_probe needs a --seq_len of at least 2")
        whole = (batch.labels != IGNORE_INDEX).all(1)
        if not whole.any():
            continue
        labels = batch.labels[whole].to(device)
        tokens = batch.tokens[whole]
        windows = [window for window, keep in zip(batch.positions, whole.tolist(), strict=True) if keep]
        versions = (tokens, _shuffle_first_half(tokens, windows, half, seed))
        pairs.append(torch.stack([token_losses(version.to(device), labels)[:, half:].double().mean(1) for version in versions], 1).cpu())
    count = sum(map(len, pairs))
    if count < 2:
        raise InputError(f"--context_probe needs 2 whole windows of --seq_len tokens and the split has {count}; use a smaller --seq_len")
    losses = torch.cat(pairs)
    intact, shuffled = losses.mean(0).tolist()
    standard_error = float((losses[:, 1] - losses[:, 0]).std() / count**0.5)
    return ContextProbe(intact, shuffled, standard_error, count)


def _shuffle_first_half(tokens: Tensor, windows: list[int], half: int, seed: int) -> Tensor:
    """A copy of tokens [b, t] whose first `half` columns are permuted, each row in an order of its own."""
    shuffled = tokens.clone()
    for row, window in enumerate(windows):
        order = np.random.default_rng([seed, window]).permutation(half)
        shuffled[row, :half] = tokens[row, torch.from_numpy(order)]
    return shuffled
