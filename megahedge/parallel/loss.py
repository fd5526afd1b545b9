"""Cross-entropy and KL divergence on logits whose vocabulary is cut over the ranks.  Logits are never gathered.

Everything is computed in fp32 at least, whatever the dtype of the logits: both losses cancel in bf16.  Only the logits themselves and
one number a token are kept for the backward.
"""

# b batch, t seq_len, v local vocabulary, padding included

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from megahedge.parallel.collectives import all_reduce
from megahedge.parallel.sharding import ShardSpec, shard_range
from megahedge.parallel.topology import TensorParallel
from megahedge.utils.labels import IGNORE_INDEX


@dataclasses.dataclass(frozen=True)
class VocabRange:
    """The token ids that this rank's logits belong to: [first, last); logits beyond are padding."""

    first: int
    last: int
    tensor_parallel: TensorParallel

    @classmethod
    def of(cls, vocab_size: int, tensor_parallel: TensorParallel) -> "VocabRange":
        return cls(*shard_range(ShardSpec(0, (vocab_size,)), tensor_parallel.rank, tensor_parallel.size), tensor_parallel)

    def widen(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """Logits over the temperature in fp32 (fp64 stays), padding cut off: [b, t, last - first]."""
        wide = logits[..., : self.last - self.first].to(torch.promote_types(logits.dtype, torch.float32))
        return wide if temperature == 1.0 else wide / temperature

    def logsumexp(self, wide: Tensor) -> Tensor:
        """log Σ exp over the whole vocabulary: [b, t]."""
        if self.last > self.first:
            local_max = wide.amax(-1)
        else:  # a rank that holds padding only
            local_max = wide.new_full(wide.shape[:-1], -torch.inf)
        maximum = all_reduce(local_max, self.tensor_parallel, dist.ReduceOp.MAX)
        return all_reduce((wide - maximum.unsqueeze(-1)).exp_().sum(-1), self.tensor_parallel).log_().add_(maximum)

    def cross_entropy(self, wide: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Of each token in nats, 0 where the label is −100, and the logsumexp that the gradient needs; both like `labels`."""
        logsumexp = self.logsumexp(wide)
        ours, index = self._locate(labels)
        if wide.shape[-1]:
            target = wide.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~ours, 0)
        else:
            target = torch.zeros_like(logsumexp)
        losses = logsumexp - all_reduce(target, self.tensor_parallel)
        return losses.masked_fill(labels == IGNORE_INDEX, 0), logsumexp

    def cross_entropy_gradient(self, wide: Tensor, labels: Tensor, logsumexp: Tensor, slope: Tensor) -> Tensor:
        """slope · (softmax − one-hot), like `wide`; slope like `labels`."""
        slope = slope.masked_fill(labels == IGNORE_INDEX, 0).unsqueeze(-1)
        local = (wide - logsumexp.unsqueeze(-1)).exp_().mul_(slope)
        ours, index = self._locate(labels)
        if local.shape[-1]:
            local.scatter_add_(-1, index.unsqueeze(-1), (-slope).masked_fill(~ours.unsqueeze(-1), 0))
        return local

    def divergence(self, teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """KL(teacher ‖ student) of each token in nats, and the logsumexps of both; all without the vocabulary's dimension."""
        teacher_logsumexp, student_logsumexp = self.logsumexp(teacher), self.logsumexp(student)
        terms = _kl_terms(teacher - teacher_logsumexp.unsqueeze(-1), student - student_logsumexp.unsqueeze(-1))
        return all_reduce(terms.sum(-1), self.tensor_parallel), teacher_logsumexp, student_logsumexp

    def _locate(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each label is ours, and its local index (0 where it is not)."""
        ours = (labels >= self.first) & (labels < self.last)
        return ours, (labels - self.first).masked_fill(~ours, 0)


def divergence_gradient(teacher: Tensor, student: Tensor, teacher_logsumexp: Tensor, student_logsumexp: Tensor, slope: Tensor) -> Tensor:
    """slope · (student softmax − teacher softmax): the gradient of KL(teacher ‖ student) for the student's logits as they are given."""
    local = (student - student_logsumexp.unsqueeze(-1)).exp_()
    return local.sub_((teacher - teacher_logsumexp.unsqueeze(-1)).exp_()).mul_(slope.unsqueeze(-1))


def pad_gradient(local: Tensor, logits: Tensor) -> Tensor:
    """Gradient of the real logits as one of all local logits, padding 0, in their dtype."""
    if local.shape == logits.shape:
        return local.to(logits.dtype)
    gradient = torch.zeros_like(logits)
    gradient[..., : local.shape[-1]] = local
    return gradient


def vocab_parallel_token_losses(logits: Tensor, labels: Tensor, vocab_size: int, tensor_parallel: TensorParallel) -> Tensor:
    """Cross-entropy of each token in nats, [b, t], fp32; 0 where the label is −100.

    logits [b, t, v] of this rank, labels [b, t] int64 over the whole vocabulary, replicated.
    """
    return _TokenLosses.apply(logits, labels, VocabRange.of(vocab_size, tensor_parallel))


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, tensor_parallel: TensorParallel) -> Tensor:
    """Mean cross-entropy in nats over the tokens whose label is not −100 (0 where there is none), a scalar."""
    losses = vocab_parallel_token_losses(logits, labels, vocab_size, tensor_parallel)
    return masked_mean(losses, labels != IGNORE_INDEX)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` where `mask` is true; 0 where it is true nowhere."""
    return values.masked_fill(~mask, 0).sum() / mask.sum().clamp(min=1)


def vocab_parallel_kl(
    teacher_logits: Tensor, student_logits: Tensor, vocab_size: int, tensor_parallel: TensorParallel, temperature: float = 1.0
) -> Tensor:
    """KL(teacher ‖ student) of each token in nats, [b, t], fp32, both softmaxes taken at `temperature`.

    The gradient goes to the student only.  Equal logits give exactly 0.  No factor temperature² is applied.
    """
    return _TokenKL.apply(student_logits, teacher_logits, temperature, VocabRange.of(vocab_size, tensor_parallel))


def _kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """q − p − p log(q / p): non-negative terms whose sum is KL(p ‖ q), because p and q sum to the same.

    Terms p log(p / q) of both signs would cancel to an error of 1e-6 in fp32, more than the divergences that matter near hand-over.
    """
    p, difference = log_p.exp(), log_q - log_p
    near = p * (torch.expm1(difference) - difference)
    far = log_q.exp() - p * (1 + difference)  # where expm1 might overflow
    return torch.where(difference.abs() < 1, near, far)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, vocab):
        losses, logsumexp = vocab.cross_entropy(vocab.widen(logits), labels)
        ctx.save_for_backward(logits, labels, logsumexp)
        ctx.vocab = vocab
        return losses

    @staticmethod
    def backward(ctx, slope):
        logits, labels, logsumexp = ctx.saved_tensors
        return pad_gradient(ctx.vocab.cross_entropy_gradient(ctx.vocab.widen(logits), labels, logsumexp, slope), logits), None, None


class _TokenKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student_logits, teacher_logits, temperature, vocab):
        teacher, student = vocab.widen(teacher_logits, temperature), vocab.widen(student_logits, temperature)
        divergence, *logsumexps = vocab.divergence(teacher, student)
        ctx.save_for_backward(student_logits, teacher_logits, *logsumexps)
        ctx.temperature, ctx.vocab = temperature, vocab
        return divergence

    @staticmethod
    def backward(ctx, slope):
        student_logits, teacher_logits, *logsumexps = ctx.saved_tensors
        teacher, student = (ctx.vocab.widen(logits, ctx.temperature) for logits in (teacher_logits, student_logits))
        local = divergence_gradient(teacher, student, *logsumexps, slope / ctx.temperature)
        return pad_gradient(local, student_logits), None, None, None
