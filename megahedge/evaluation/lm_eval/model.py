"""An opened model as lm-eval wants it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megahedge.evaluation.continuations import ContinuationScorer, RequestError
from megahedge.evaluation.models import OpenModel
from megahedge.utils.errors import InputError

DEFAULT_MAX_LENGTH = 2048
"""Where a model's config names no longest sequence; the value of lm-eval's `hf` model."""
_MAX_NEW_TOKENS = 256
"""Where a task does not say how much may be generated; the value of lm-eval's `hf` model."""
_GREEDY_OPTIONS = {"do_sample", "temperature", "top_k", "top_p"}
"""Options of generation that change nothing when the likeliest token is always taken."""


def _place(task: str, row: int) -> str:
    return f"row {row + 1} of task {task}"


class TaskModel(TemplateLM):
    """Answers the three kinds of requests that tasks are made of: of continuations, of whole texts, and for text."""

    def __init__(self, model: OpenModel, batch_size: int, device: torch.device | str, place: Callable[[str, int], str] = _place):
        """place: from a task and the number of its row to where that comes from, for people."""
        super().__init__()
        self._place = place
        self.tokenizer = model.tokenizer
        self.scorer = ContinuationScorer(model.logits, model.max_seq_len or DEFAULT_MAX_LENGTH, batch_size, device)

    @property
    def eot_token_id(self) -> int:
        """End of text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        return self.tokenizer.eos_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; special tokens as the tokenizer adds them by itself (GPT-NeoX: none), never twice."""
        if add_special_tokens is None:
            if not string.startswith(self.tokenizer.decode([self.prefix_token_id])):
                return self.tokenizer.encode(string)
            add_special_tokens = False
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def loglikelihood(self, requests: list, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Scores of (context, continuation); lm-eval splits them into tokens, and calls the next method."""
        try:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        except RequestError as error:
            request = requests[error.index]
            raise InputError(f"{self._place(request.task_name, request.doc_id)} {error}") from None

    def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
        return self.scorer.score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of whole texts, in windows of the model's length that score each token once."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.scorer.max_length, context_len=1):
                windows.append(make_disjoint_window(window))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (log_likelihood, _) in zip(owners, self.scorer.score(windows), strict=True):
            sums[owner] += log_likelihood
        return sums

    def generate_until(self, requests: list, disable_tqdm: bool = True) -> list[str]:
        """Greedy text up to the first stop string."""
        texts = [""] * len(requests)
        for (max_new_tokens, until), members in _by_generation(requests, self.tokenizer.decode([self.eot_token_id])).items():
            contexts = [self.tok_encode(requests[index].args[0]) for index in members]
            written = self.scorer.write(contexts, max_new_tokens, lambda tokens, until=until: self._stops(tokens, until))
            for index, tokens in zip(members, written, strict=True):
                texts[index] = _before(self.tokenizer.decode(tokens, skip_special_tokens=True), until)
        return texts

    def _stops(self, tokens: list[int], until: tuple[str, ...]) -> bool:
        if tokens[-1] == self.eot_token_id:
            return True
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return any(stop in text for stop in until)


def _by_generation(requests: list, end_of_text: str) -> dict[tuple[int, tuple[str, ...]], list[int]]:
    """Numbers of the requests by (most tokens, stop strings).  Raises InputError for tasks that want more than greedy generation."""
    groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for index, request in enumerate(requests):
        options = dict(normalize_gen_kwargs(request.args[1], _MAX_NEW_TOKENS))
        most, until = options.pop("max_gen_toks"), options.pop("until", None) or []
        others = set(options) if options.get("do_sample") else set(options) - _GREEDY_OPTIONS
        if others:
            raise InputError(
                f"task {request.task_name} generates with {', '.join(sorted(others))}; only greedy generation is supported here"
            )
        stops = [until] if isinstance(until, str) else list(until)
        groups.setdefault((most, tuple(stop for stop in dict.fromkeys([*stops, end_of_text]) if stop)), []).append(index)
    return groups


def _before(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stop strings."""
    for stop in stops:
        text = text.split(stop)[0]
    return text
