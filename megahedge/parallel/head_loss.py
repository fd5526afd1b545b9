"""Head and losses in one: cross-entropy, and KL to a teacher, straight from hidden states, a block of tokens at a time.

Logits of all tokens are never held: at 50,000 tokens of vocabulary they and their gradient take more memory than all else of a step.
"""

# b batch, t seq_len, d hidden_size, v local vocabulary, padding included

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megahedge.parallel.loss import VocabRange, divergence_gradient, pad_gradient, vocab_parallel_kl, vocab_parallel_token_losses
from megahedge.parallel.topology import TensorParallel

BLOCK_LOGITS = 1 << 24
"""Logits of a block, about: 64 MB in fp32."""


@dataclasses.dataclass(frozen=True)
class Distillation:
    """KL(teacher ‖ student) as a share of the loss."""

    teacher_hidden: Tensor
    """What the head makes the teacher's logits of, [b, t, d]."""
    alpha: float
    """Its share; cross-entropy has the rest."""
    temperature: float = 1.0
    """Of both softmaxes in the divergence."""


Losses = tuple[Tensor, Tensor, Tensor | None]
"""Of each token in nats, [b, t], fp32 at least: the loss; then without gradient its cross-entropy, 0 where the label is −100, and
KL(teacher ‖ student), None without a teacher."""


def head_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab_size: int,
    tensor_parallel: TensorParallel,
    distillation: Distillation | None = None,
) -> Losses:
    """hidden [b, t, d], past `copy_to_tp`; weight [v, d] of this rank; labels [b, t] int64, −100 where nothing is scored.

    The gradient of a frozen head's input is made along with the losses, so that each logit is computed once.  A head that trains
    keeps the logits.
    """
    if weight.requires_grad and torch.is_grad_enabled():
        return _losses_of_logits(hidden, weight, labels, vocab_size, tensor_parallel, distillation)
    teacher = None if distillation is None else distillation.teacher_hidden.detach()
    shares = (0.0, 1.0) if distillation is None else (distillation.alpha, distillation.temperature)
    vocab = VocabRange.of(vocab_size, tensor_parallel)
    loss, cross_entropy, divergence = _FrozenHead.apply(hidden, weight.detach(), labels, teacher, *shares, vocab)
    return loss, cross_entropy, None if distillation is None else divergence


def _losses_of_logits(hidden, weight, labels, vocab_size, tensor_parallel, distillation) -> Losses:
    logits = F.linear(hidden, weight)
    cross_entropy = vocab_parallel_token_losses(logits, labels, vocab_size, tensor_parallel)
    if distillation is None:
        return cross_entropy, cross_entropy.detach(), None
    teacher_logits = F.linear(distillation.teacher_hidden, weight).detach()
    divergence = vocab_parallel_kl(teacher_logits, logits, vocab_size, tensor_parallel, distillation.temperature)
    return torch.lerp(cross_entropy, divergence, distillation.alpha), cross_entropy.detach(), divergence.detach()


class _FrozenHead(torch.autograd.Function):
    """hidden and teacher (or None) [b, t, d], labels [b, t] → loss, cross-entropy and divergence (0 without a teacher), each [b, t].

    A token's loss depends on its own hidden state alone, so that the gradient for a slope of 1 serves every slope.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, teacher, alpha, temperature, vocab):
        inputs, targets = hidden.flatten(0, -2), labels.flatten()
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        cross_entropy, divergence = torch.zeros(2, len(targets), dtype=dtype, device=hidden.device).unbind()
        slopes = torch.empty_like(inputs) if ctx.needs_input_grad[0] else None
        size = max(1, BLOCK_LOGITS // max(1, len(weight)))
        for span in (slice(start, start + size) for start in range(0, len(targets), size)):
            logits = F.linear(inputs[span], weight)
            wide, ones = vocab.widen(logits), torch.ones_like(cross_entropy[span])
            cross_entropy[span], logsumexp = vocab.cross_entropy(wide, targets[span])
            if slopes is not None:
                gradient = vocab.cross_entropy_gradient(wide, targets[span], logsumexp, (1 - alpha) * ones)
            if teacher is not None:
                wide = vocab.widen(logits, temperature)
                taught = vocab.widen(F.linear(teacher.flatten(0, -2)[span], weight), temperature)
                divergence[span], *logsumexps = vocab.divergence(taught, wide)
                if slopes is not None:
                    gradient += divergence_gradient(taught, wide, *logsumexps, (alpha / temperature) * ones)
            if slopes is not None:
                slopes[span] = pad_gradient(gradient, logits) @ weight
        if slopes is not None:
            ctx.save_for_backward(slopes.view_as(hidden))
        loss = torch.lerp(cross_entropy, divergence, alpha)
        losses, *parts = (x.view_as(labels) for x in (loss, cross_entropy, divergence))
        ctx.mark_non_differentiable(*parts)
        return losses, *parts

    @staticmethod
    @once_differentiable
    def backward(ctx, slope, *_):
        (slopes,) = ctx.saved_tensors
        return (slopes * slope.unsqueeze(-1)).to(slopes.dtype), *[None] * 6
