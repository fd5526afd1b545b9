"""From one stage to the next: which parameters are new, and the proof that a model still computes what its checkpoint computed.

A probe is a batch of tokens with the logits that a checkpoint's parameters give on it in fp64.  They are computed from the tensors
as they were written, not from the module that trained, so that the probe covers rounding, sharding and naming as well.
"""

# b batch, t seq_len

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from megahedge.config.model import ModelConfig
from megahedge.models.block import Block
from megahedge.models.context import SequenceContext
from megahedge.models.language_model import SINGLE, LanguageModel
from megahedge.models.norms import LayerNorm
from megahedge.parallel.layers import VocabParallelEmbedding, VocabParallelHead
from megahedge.parallel.loss import vocab_parallel_kl
from megahedge.parallel.sharding import Index, ShardSpec, shard

MAX_PROBE_KL = 1e-8
"""Mean KL in nats a token up to which two models are the same function.

A correct hand-over measures 1e-11 and less in fp32 in most models.  Where normalisers of features with signs come near 0 the rounding of
fp32 alone makes 1e-7, and fp64 1e-14.
"""
PROBE_SHAPE = (2, 128)
"""Most sequences and tokens of a probe: at 50,000 tokens of vocabulary its logits take 50 MB."""

Read = Callable[[str], Tensor]
"""Gives a whole tensor by the name of its parameter."""


class Source(Protocol):
    """Tensors of a model by the names of its parameters: a published folder, or a checkpoint's group."""

    def __contains__(self, name: str) -> bool:
        """Whether the tensor is there."""

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """A tensor, or a piece of it."""


def either_source(given: Source, fresh: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of name and index that reads from `given` what is there, and asks `fresh` for the rest."""
    return lambda name, index=None: given.read(name, index) if name in given else fresh(name, *([] if index is None else [index]))


def parameter_names(config: ModelConfig) -> list[str]:
    """Names of the parameters of the model of that config."""
    with torch.device("meta"):
        return [name for name, _ in LanguageModel(config).named_parameters()]


def added_parameters(config: ModelConfig, kind: str) -> set[str]:
    """Names of the parameters that the model of `config` has beyond the one whose mixer is of `kind`."""
    return set(parameter_names(config)) - set(parameter_names(config.with_mixer(config.mixer.as_kind(kind))))


@torch.no_grad()
def stream_logits(
    config: ModelConfig, read: Read, tokens: Tensor, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Logits [b, t, vocab_size], computed in `dtype`, of the model whose tensors `read` gives; holds one layer in memory at a time."""

    def filled(module: nn.Module, prefix: str) -> nn.Module:
        for name, parameter in module.to(dtype).named_parameters():
            parameter.copy_(read(f"{prefix}.{name}"))
        return module

    tokens = tokens.to(device)
    std, sizes = config.initializer_range, (config.vocab_size, config.hidden_size)
    with torch.device(device):
        context = SequenceContext.of(tokens, config)
        hidden = filled(VocabParallelEmbedding(*sizes, SINGLE, std=std), "embedding")(tokens)
        for index in range(config.num_layers):
            hidden = filled(Block(config, SINGLE, index), f"blocks.{index}")(hidden, context)
        hidden = filled(LayerNorm(config.hidden_size, config.norm_eps, SINGLE), "final_norm")(hidden)
        head = VocabParallelHead(config.hidden_size, config.vocab_size, SINGLE, std=std)
        return filled(head, "embedding" if config.tie_word_embeddings else "lm_head")(hidden)


def make_probe(config: ModelConfig, tokens: Tensor, read: Read) -> dict[str, Tensor]:
    """`tokens` [b, t] and, in fp32, the `logits` of the model whose tensors `read` gives; as good as exact, being computed in fp64."""
    return {"tokens": tokens, "logits": stream_logits(config, read, tokens, dtype=torch.float64).float()}


def probe_divergence(model: LanguageModel, tokens: Tensor, logits: Tensor) -> float:
    """Mean KL(probe ‖ model) in nats a token of a live fp32 model, cut over any TP group.  Collective over that group.

    tokens [b, t], logits [b, t, vocab_size] in fp32.  Where the model's arithmetic in fp32 makes it more than MAX_PROBE_KL, be it by
    rounding or by a fault, it is measured again in fp64, which tells; the model has its dtype back then.
    """
    divergence = _divergence(model, tokens, logits)
    if divergence > MAX_PROBE_KL:
        with _computing_in_fp64(model):
            divergence = _divergence(model, tokens, logits)
    return divergence


@torch.no_grad()
def _divergence(model: LanguageModel, tokens: Tensor, logits: Tensor) -> float:
    device = next(model.parameters()).device
    spec = ShardSpec(2, tuple(logits.shape))
    expected = shard(logits, spec, model.tensor_parallel.rank, model.tensor_parallel.size).to(device)
    was_training = model.training
    found = model.eval()(tokens.to(device))
    model.train(was_training)
    return vocab_parallel_kl(expected.to(found.dtype), found, model.config.vocab_size, model.tensor_parallel).mean().item()


@contextlib.contextmanager
def _computing_in_fp64(model: LanguageModel) -> Iterator[None]:
    """Within `with`, each part of an fp32 model is fp64 while it computes, so that memory holds one layer more than before."""

    def widen(part: nn.Module, inputs: tuple) -> None:
        part.double()

    def narrow(part: nn.Module, inputs: tuple, output: Tensor) -> None:
        part.float()

    with contextlib.ExitStack() as hooks:
        for part in (model.embedding, *model.blocks, model.final_norm, model.lm_head):
            hooks.enter_context(part.register_forward_pre_hook(widen))
            hooks.enter_context(part.register_forward_hook(narrow))
        yield
