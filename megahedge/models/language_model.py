"""The decoder-only language model that teacher and students are."""

# b batch, t seq_len

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megahedge.config.model import ModelConfig
from megahedge.kernels import DenominatorStats
from megahedge.models.block import Block
from megahedge.models.context import SequenceContext
from megahedge.models.norms import LayerNorm
from megahedge.parallel.head_loss import Distillation, Losses, head_losses
from megahedge.parallel.layers import VocabParallelEmbedding, VocabParallelHead
from megahedge.parallel.topology import TensorParallel
from megahedge.utils.recomputation import recomputation_contexts

SINGLE = TensorParallel()


class LanguageModel(nn.Module):
    """Embedding, blocks, final norm, head.  Parameters are left uninitialised: load or initialise them.

    `activation_checkpointing` recomputes each block in the backward.  It is the non-re-entrant form: the re-entrant one yields no
    gradients at all, silently, under a frozen embedding.
    Raises InputError if the TP size does not divide the heads or the MLP's width.
    """

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel = SINGLE, activation_checkpointing: bool = False):
        super().__init__()
        self.config = config
        self.tensor_parallel = tensor_parallel
        self.activation_checkpointing = activation_checkpointing
        std = config.initializer_range
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tensor_parallel, std=std)
        self.blocks = nn.ModuleList([Block(config, tensor_parallel, index) for index in range(config.num_layers)])
        self.final_norm = LayerNorm(config.hidden_size, config.norm_eps, tensor_parallel)
        tied = self.embedding.weight if config.tie_word_embeddings else None
        self.lm_head = VocabParallelHead(config.hidden_size, config.vocab_size, tensor_parallel, std=std, tied=tied)

    def forward(self, tokens: Tensor, boundaries: Tensor | None = None, stats: DenominatorStats | None = None) -> Tensor:
        """tokens [b, t] int64 → logits [b, t, ceil(vocab_size / tp_size)] of this rank's part of the vocabulary.

        boundaries [b, t] bool, true where a document begins of which nothing before is a part: positions count from there, and
        no mixer looks across.  stats counts the normalisers of linear attention.
        """
        return self.lm_head(self.hidden_states(tokens, boundaries, stats))

    def token_losses(self, tokens: Tensor, labels: Tensor, boundaries: Tensor | None = None) -> Tensor:
        """Cross-entropy of each label in nats, [b, t] fp32, the same on every TP rank; 0 where the label is −100."""
        return self.head_losses(self.hidden_states(tokens, boundaries), labels)[0]

    def head_losses(self, hidden: Tensor, labels: Tensor, distillation: Distillation | None = None) -> Losses:
        """From what `hidden_states` returns, without the logits of all tokens; see `megahedge.parallel.head_loss`."""
        vocabulary = (self.config.vocab_size, self.tensor_parallel)
        return self.lm_head(hidden, lambda hidden, weight: head_losses(hidden, weight, labels, *vocabulary, distillation))

    def hidden_states(self, tokens: Tensor, boundaries: Tensor | None = None, stats: DenominatorStats | None = None) -> Tensor:
        """What the head reads: the last block's output after the final norm, [b, t, hidden_size]."""
        context = SequenceContext.of(tokens, self.config, boundaries, stats)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = self.recompute(block, hidden, context)
        return self.final_norm(hidden)

    def recompute(self, function: Callable, *arguments):
        """function(*arguments), its activations recomputed in the backward where the model was asked for that."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(function, *arguments, use_reentrant=False, context_fn=recomputation_contexts)
        return function(*arguments)
