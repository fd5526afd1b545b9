"""Token perplexity: windows of seq_len without overlap, EOD kept, every token scored once.

The paper states no protocol; its 13.86 for Pythia-1B is comparable only under this one.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megahedge.data.loader import Batch
from megahedge.utils.labels import IGNORE_INDEX

TokenLosses = Callable[..., Tensor]
"""(tokens [b, t], labels [b, t], and boundaries [b, t] if a batch has them) -> cross-entropy of each label in nats [b, t], 0 where the
label is IGNORE_INDEX."""


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text."""

    nats: float
    """Summed cross-entropy."""
    tokens: int
    """Tokens scored."""

    @property
    def loss(self) -> float:
        """Mean cross-entropy per token in nats."""
        return self.nats / self.tokens

    @property
    def token_perplexity(self) -> float:
        """exp of the mean loss."""
        return perplexity_of(self.loss)

    def word_perplexity(self, words: int) -> float:
        """exp of the loss per word of the scored text."""
        return perplexity_of(self.nats / words)

    def bits_per_byte(self, text_bytes: int) -> float:
        """Loss in bits over the scored text's UTF-8 bytes."""
        return self.nats / math.log(2) / text_bytes


def perplexity_of(loss: float) -> float:
    """e to a loss in nats; infinity where that is more than fp64 holds."""
    return math.inf if loss > 700 else math.exp(loss)


@torch.no_grad()
def measure_perplexity(
    token_losses: TokenLosses, batches: Iterable[Batch], device: torch.device | str = "cpu", dp_group=None
) -> Perplexity:
    """Score batches; with `dp_group` each rank scores its own share and all get the sum.

    Sums are kept in float64, so that neither the batch size nor the number of ranks changes the figure.
    """
    nats = torch.zeros((), dtype=torch.float64, device=device)
    count = torch.zeros((), dtype=torch.float64, device=device)
    for batch in batches:
        nats += token_losses(*batch.inputs(device)).double().sum()
        count += (batch.labels != IGNORE_INDEX).sum()
    totals = torch.stack([nats, count])
    if dp_group is not None:
        dist.all_reduce(totals, group=dp_group)
    return Perplexity(nats=float(totals[0]), tokens=int(totals[1]))
