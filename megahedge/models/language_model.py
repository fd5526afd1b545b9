"""The decoder-only language model that teacher and students are."""

# b batch, t seq_len

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megahedge.config.model import ModelConfig
from megahedge.models.block import Block
from megahedge.models.norms import LayerNorm
from megahedge.models.rotary import Rotary
from megahedge.parallel.layers import VocabParallelEmbedding, VocabParallelHead
from megahedge.parallel.loss import vocab_parallel_token_losses
from megahedge.parallel.topology import TensorParallel

SINGLE = TensorParallel()


class LanguageModel(nn.Module):
    """Embedding, blocks, final norm, head.  Parameters are left uninitialised: load or initialise them.

    `activation_checkpointing` recomputes each block in the backward.  It is the non-re-entrant form: the re-entrant one yields no
    gradients at all, silently, under a frozen embedding.
    Raises InputError if the TP size does not divide the heads or the MLP's width.
    """

    def __init__(
        self, config: ModelConfig, tensor_parallel: TensorParallel = SINGLE, mixer: str = "softmax", activation_checkpointing: bool = False
    ):
        super().__init__()
        self.config = config
        self.tensor_parallel = tensor_parallel
        self.activation_checkpointing = activation_checkpointing
        std = config.initializer_range
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tensor_parallel, std=std)
        self.blocks = nn.ModuleList([Block(config, tensor_parallel, index, mixer) for index in range(config.num_layers)])
        self.final_norm = LayerNorm(config.hidden_size, config.norm_eps, tensor_parallel)
        tied = self.embedding.weight if config.tie_word_embeddings else None
        self.lm_head = VocabParallelHead(config.hidden_size, config.vocab_size, tensor_parallel, std=std, tied=tied)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """tokens [b, t] int64 → logits [b, t, ceil(vocab_size / tp_size)] of this rank's part of the vocabulary.

        positions [t] or [b, t] for RoPE; 0 … t − 1 where not given.
        """
        return self.lm_head(self.hidden_states(tokens, positions))

    def token_losses(self, tokens: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
        """Cross-entropy of each label in nats, [b, t] fp32, the same on every TP rank; 0 where the label is −100."""
        return vocab_parallel_token_losses(self(tokens, positions), labels, self.config.vocab_size, self.tensor_parallel)

    def hidden_states(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """What the head reads: the last block's output after the final norm, [b, t, hidden_size]."""
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
        rotary = Rotary.of(positions, self.config)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = self._run(block, hidden, rotary)
        return self.final_norm(hidden)

    def _run(self, block: Block, hidden: Tensor, rotary: Rotary) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, hidden, rotary, use_reentrant=False)
        return block(hidden, rotary)
