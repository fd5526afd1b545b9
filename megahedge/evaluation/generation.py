"""Text that models write, by transformers' generate(): a student's every token costs the same, however long the text is."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from megahedge.evaluation.models import DTYPES, open_hf_model, teacher_of
from megahedge.export.to_hf import MODEL_TYPE
from megahedge.utils.errors import InputError, blamed_on, check_known
from megahedge.utils.logging import get_logger

logger = get_logger(__name__)

MIN_TEMPERATURE = 1e-3
"""Logits divided by less could overflow fp32, and would give the likeliest token all the same."""
SEEDS = 2**32
"""Number of seeds that numpy, which transformers seeds too, takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """scripts/generate.py"""

    model: str
    """Run folder, one of its checkpoints, Hugging Face folder, or hub name."""
    prompt: str | None = None
    """Text to go on from; without it prompts are read, a line each."""
    compare_teacher: bool = False
    """Let the teacher of the model go on from the same text."""
    teacher: str | None = None
    """Folder or hub name of the teacher to compare with, where it is no longer where the run found it."""
    max_new_tokens: int = 100
    """Most tokens to write; the end of a document ends it earlier."""
    temperature: float = 0.8
    """Divides the logits before sampling; 0 always takes the likeliest token."""
    top_k: int = 0
    """Sample among so many likeliest tokens only (0: all)."""
    top_p: float = 0.95
    """Sample among the fewest likeliest tokens of this probability together (1: all)."""
    seed: int = 1234
    """Seed of the sampling, set anew for each prompt and model."""
    dtype: str = "fp32"
    """Precision of parameters and activations: fp32 or bf16."""

    def __post_init__(self):
        check_known("dtype", self.dtype, DTYPES)
        if self.prompt == "":
            raise InputError("--prompt='' is empty; give some text to go on from")
        if self.prompt is not None:
            _check_text(self.prompt)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise InputError(f"--temperature={self.temperature} is too small to divide by; use 0 for the likeliest token")
        for name, least in (("max_new_tokens", 1), ("temperature", 0.0), ("top_k", 0), ("seed", 0)):
            if not least <= getattr(self, name) < float("inf"):
                raise InputError(f"--{name}={getattr(self, name)} must be finite and at least {least}")
        if self.seed >= SEEDS:
            raise InputError(f"--seed={self.seed} must be below 2**32")
        if not 0 < self.top_p <= 1:
            raise InputError(f"--top_p={self.top_p} must lie above 0 and be at most 1")


def _check_text(prompt: str) -> None:
    """Raise InputError for lone surrogates, by which Python shows bytes that are not UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InputError(f"the prompt {prompt!r} is not valid UTF-8") from None


class Writer:
    """A model that goes on from text."""

    def __init__(self, name: str | os.PathLike, options: GenerateOptions):
        """Raises InputError for a model that cannot be had, or has no tokenizer."""
        self.name, self.options = os.fspath(name), options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.tokenizer = open_hf_model(name, options.dtype, self.device)
        if self.tokenizer is None:
            raise InputError(f"{name} has no tokenizer with it, so no text can be read or written")

    def write(self, prompt: str, show: Callable[[str], None]) -> str:
        """Go on from a prompt; the new text, which `show` gets piece by piece as well.

        Raises InputError for a prompt that is no text, or that leaves no room for a token after it.
        """
        _check_text(prompt)
        tokens = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids.to(self.device)
        if tokens.numel() == 0:
            raise InputError(f"the prompt {prompt!r} has no tokens")
        self._check_room(tokens.shape[1])
        stream = _Stream(self.tokenizer, show)
        transformers.set_seed(self.options.seed)
        self.model.generate(tokens, attention_mask=torch.ones_like(tokens), streamer=stream, **self._sampling())
        return "".join(stream.pieces)

    def _check_room(self, prompt_tokens: int) -> None:
        """A softmax model has no position beyond its last; a student has no last."""
        config = self.model.config
        most = getattr(config, "max_position_embeddings", None)
        wanted = prompt_tokens + self.options.max_new_tokens
        if most is None or wanted <= most:
            return
        text = (
            f"the prompt has {prompt_tokens} tokens, with --max_new_tokens={self.options.max_new_tokens} that is {wanted}; "
            f"{self.name} was made for max_position_embeddings={most}"
        )
        if config.model_type != MODEL_TYPE:
            raise InputError(text)
        logger.warning("%s: what it makes of more is untested", text)

    def _sampling(self) -> dict:
        options, tokenizer = self.options, self.tokenizer
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
        chosen = {"do_sample": False}
        if options.temperature > 0:
            chosen = {"do_sample": True, "temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
        return {"max_new_tokens": options.max_new_tokens, **ends, **chosen}


class _Stream(transformers.TextStreamer):
    """Hands on the new text in whole words."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show, self.pieces = show, []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)
        self._show(text)


def writers(options: GenerateOptions) -> Iterator[Writer]:
    """The model and, where it was asked for, its teacher.  Raises InputError for one that cannot be had."""
    with blamed_on("model"):
        model = Writer(options.model, options)
    yield model
    if options.compare_teacher or options.teacher is not None:
        name = options.teacher or teacher_of(options.model)
        with blamed_on("teacher"):
            teacher = Writer(name, options)
        yield teacher
