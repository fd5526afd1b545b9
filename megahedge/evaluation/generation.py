"""Text that a model writes, token by token."""

# t tokens so far, v vocab_size

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megahedge.evaluation.models import open_model
from megahedge.utils.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """scripts/generate.py"""

    model: str
    """Run folder, one of its checkpoints, Hugging Face folder, or hub name."""
    prompt: str
    """Text to go on from."""
    max_new_tokens: int = 100
    """Most tokens to write; the end of a document ends it earlier."""
    temperature: float = 0.8
    """Divides the logits before sampling; 0 always takes the likeliest token."""
    top_k: int = 0
    """Sample among so many likeliest tokens only (0: all)."""
    top_p: float = 0.95
    """Sample among the fewest likeliest tokens of this probability together (1: all)."""
    seed: int = 1234
    """Seed of the sampling."""
    dtype: str = "fp32"
    """Precision of parameters and activations: fp32 or bf16."""
    implementation: str = "auto"
    """Whose forward pass runs a Hugging Face folder: megahedge, transformers, or auto (megahedge for the families that it knows)."""

    def __post_init__(self):
        if not self.prompt:
            raise InputError("--prompt='' is empty; give some text to go on from")
        for name, least in (("max_new_tokens", 1), ("temperature", 0.0), ("top_k", 0), ("seed", 0)):
            if not least <= getattr(self, name) < float("inf"):
                raise InputError(f"--{name}={getattr(self, name)} must be finite and at least {least}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"--top_p={self.top_p} must lie above 0 and be at most 1")


def generate(options: GenerateOptions) -> Iterator[str]:
    """Pieces of text as they are written, the prompt not among them.

    Every token costs a forward pass over all tokens so far.
    Raises InputError for a model that cannot be had, or has no tokenizer.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = open_model(options.model, options.implementation, options.dtype, device)
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InputError(f"--model={options.model} has no tokenizer with it, so no text can be read or written")
    prompt = torch.tensor([tokenizer.encode(options.prompt, add_special_tokens=False)], device=device)
    if prompt.numel() == 0:
        raise InputError(f"--prompt={options.prompt!r} has no tokens")
    written, text = [], ""
    for token in sample(model.logits, prompt, options):
        if token == tokenizer.eos_token_id:
            return
        written.append(token)
        now = tokenizer.decode(written)
        if now.endswith("\N{REPLACEMENT CHARACTER}"):  # in the middle of a character of several bytes
            continue
        yield now[len(text) :]
        text = now


@torch.no_grad()
def sample(logits: Callable[[Tensor], Tensor], tokens: Tensor, options: GenerateOptions) -> Iterator[int]:
    """Tokens that follow tokens [1, t], at most max_new_tokens of them; a function of the seed."""
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.max_new_tokens):
        token = choose(logits(tokens)[0, -1].float().cpu(), options, generator)
        yield token
        tokens = torch.cat((tokens, tokens.new_tensor([[token]])), dim=1)


def choose(logits: Tensor, options: GenerateOptions, generator: torch.Generator) -> int:
    """One token by its logits [v]."""
    if options.temperature == 0:
        return int(logits.argmax())
    probabilities, order = (logits / options.temperature).softmax(-1).sort(descending=True)
    if options.top_k:
        probabilities[options.top_k :] = 0
    before = probabilities.cumsum(-1) - probabilities
    probabilities[before >= options.top_p] = 0  # never the likeliest: nothing is before it
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
