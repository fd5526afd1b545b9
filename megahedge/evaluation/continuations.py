"""What a model says of continuations: log-likelihoods and greedy text, in batches whose size changes no figure."""

# b inputs in a batch, t tokens of the longest, c tokens of a continuation, v vocab_size

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megahedge.utils.errors import InputError, RunError
from megahedge.utils.logging import get_logger
from megahedge.utils.progress import ProgressBar

logger = get_logger(__name__)

_PAD = 0
"""Pads lie on the right, after everything that is scored, and a causal model does not look there: any token serves."""


class RequestError(InputError):
    """A request that cannot be scored."""

    def __init__(self, index: int, reason: str):
        super().__init__(reason)
        self.index = index
        """Its place among the requests."""


@dataclasses.dataclass(frozen=True)
class ContinuationScorer:
    """Scores and writes continuations with the forward pass of a model."""

    logits: Callable[[Tensor], Tensor]
    """From tokens [b, t] to [b, t, v]."""
    max_length: int
    """Most tokens that the model takes; a longer input loses its first tokens."""
    batch_size: int
    """Inputs of the greatest length per forward, of shorter ones as many as have as many tokens; changes no figure."""
    device: torch.device | str = "cpu"

    @torch.no_grad()
    def score(self, requests: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of each request's continuation after its context, and whether greedy decoding would write it.

        Requests with one input (contexts of several continuations of one token) share its forward pass.
        Raises RequestError for a continuation without tokens, or longer than the model takes, before any is scored, and RunError for a
        score of NaN.
        """
        asked: dict[tuple[int, ...], list[int]] = {}  # requests by their input: all tokens but the last, which predicts nothing
        for index, (context, continuation) in enumerate(requests):
            self._check(index, context, continuation)
            asked.setdefault(tuple((context + continuation)[-(self.max_length + 1) : -1]), []).append(index)
        shortened = sum(len(context) + len(continuation) > self.max_length + 1 for context, continuation in requests)
        if shortened:
            logger.warning(
                "%d of %d requests are longer than %d tokens: their beginnings are cut", shortened, len(requests), self.max_length
            )
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        progress = ProgressBar(sum(map(len, asked)), "tokens", description="tasks")
        for inputs in self._batches(list(asked)):
            logits = self.logits(_right_padded(inputs, self.device))
            for row, tokens in zip(logits, inputs, strict=True):
                for index in asked[tokens]:
                    results[index] = _score_row(row[: len(tokens)], requests[index][1])
            progress.update(sum(map(len, inputs)))
        progress.close()
        if not all(math.isfinite(value) for value, _ in results):
            raise RunError("the model gives log-likelihoods that are not finite: it is broken, or its --dtype overflows")
        return results

    def _check(self, index: int, context: list[int], continuation: list[int]) -> None:
        if not context or not continuation:
            raise RequestError(index, f"has {len(context)} tokens of context and {len(continuation)} to score; both need one at least")
        if len(continuation) > self.max_length:
            raise RequestError(index, f"has {len(continuation)} tokens to score; the model takes {self.max_length}")

    @torch.no_grad()
    def write(self, contexts: Sequence[list[int]], max_new_tokens: int, finished: Callable[[list[int]], bool]) -> list[list[int]]:
        """The likeliest token after each context, again and again, until `finished(new tokens)` or there are max_new_tokens of them.

        Every token costs a forward pass over all tokens so far, whatever the model: nothing is asked of it but its logits.  The
        paper's tasks do not write; scripts/generate.py does so from a student's cache of constant size.
        Raises InputError where max_new_tokens leave no room for a context.
        """
        room = self.max_length - max_new_tokens
        if room < 1:
            raise InputError(f"max_gen_toks={max_new_tokens} of a task leaves no room in the model's {self.max_length} tokens")
        kept = [tuple(context[-room:]) for context in contexts]
        written: dict[tuple[int, ...], list[int]] = {context: [] for context in kept}
        progress = ProgressBar(len(written), "texts", description="generating")
        for batch in self._batches(list(written), max_new_tokens):
            growing = list(batch)
            for _ in range(max_new_tokens):
                tokens = [context + tuple(written[context]) for context in growing]
                logits = self.logits(_right_padded(tokens, self.device))
                for row, context, so_far in zip(logits, growing, tokens, strict=True):
                    written[context].append(int(row[len(so_far) - 1].argmax()))
                growing = [context for context in growing if not finished(written[context])]
                if not growing:
                    break
            progress.update(len(batch))
        progress.close()
        return [written[context] for context in kept]

    def _batches(self, inputs: list[tuple[int, ...]], growth: int = 0) -> Iterator[list[tuple[int, ...]]]:
        """The longest first: what memory suffices for is known at once, and neighbours need few pads.

        growth: tokens that each input may gain.
        """
        inputs.sort(key=lambda tokens: (-len(tokens), tokens))
        budget = self.batch_size * (len(inputs[0]) + growth) if inputs else 0
        start = 0
        while start < len(inputs):
            count = budget // (len(inputs[start]) + growth)
            yield inputs[start : start + count]
            start += count


def _right_padded(inputs: Sequence[tuple[int, ...]], device: torch.device | str) -> Tensor:
    """Token tensor [b, t]."""
    longest = max(map(len, inputs))
    return torch.tensor([[*tokens, *[_PAD] * (longest - len(tokens))] for tokens in inputs], device=device)


def _score_row(logits: Tensor, continuation: list[int]) -> tuple[float, bool]:
    """Score of the continuation [c] that the last c rows of logits [t, v] predict."""
    labels = torch.tensor(continuation, device=logits.device)
    log_probabilities = logits[-len(continuation) :].float().log_softmax(-1)  # [c, v]
    chosen = log_probabilities.gather(1, labels[:, None]).double().sum()
    return float(chosen), bool((log_probabilities.argmax(-1) == labels).all())
