"""Stage 1's comparison: the same module tree runs as teacher (softmax) and as student (linear attention), layer by layer."""

# b batch, t seq_len, d hidden_size

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megahedge.distill.losses import LOSSES
from megahedge.kernels import DenominatorStats
from megahedge.models.block import Block
from megahedge.models.context import SequenceContext
from megahedge.models.language_model import LanguageModel
from megahedge.models.mixers.softmax import softmax_attention
from megahedge.parallel.layers import reduce_partial_sums
from megahedge.utils.precision import full_precision

Pair = tuple[Tensor, Tensor]
"""A student's tensor and the teacher's, [b, t, d]."""


def layer_losses(
    model: LanguageModel,
    tokens: Tensor,
    inputs: str,
    targets: str,
    loss: str,
    stats: DenominatorStats | None = None,
    boundaries: Tensor | None = None,
) -> Tensor:
    """Loss of every layer, [num_layers] fp32, from tokens [b, t]; gradients reach the student's feature maps only.

    model: a `hedgehog` model whose other parameters are the teacher's, frozen.
    inputs: `student` feeds each student block what the student block before it made, `teacher` what the teacher's did.
    targets: `block` compares the blocks' outputs, `mixer` the mixers'.
    stats: counts the student's normalisers.
    boundaries [b, t] bool, true where a document begins that sees nothing of what is before.
    No logits are made.  Teacher-fed layers depend on nothing of each other: each one's gradients are made at once, and what they are
    made of is freed before the next layer.
    """
    context = SequenceContext.of(tokens, model.config, boundaries, stats)
    pairs = _teacher_fed if inputs == "teacher" else _student_fed
    losses = []
    for block, pair in zip(model.blocks, pairs(model, tokens, context, targets), strict=True):
        value = LOSSES[loss](*pair)
        losses.append(_with_gradients_of_its_own(value, block) if inputs == "teacher" else value)
    return torch.stack(losses)


def _with_gradients_of_its_own(loss: Tensor, block: Block) -> Tensor:
    """The same loss, whose gradients for the block's parameters are ready and whose graph is gone.

    Left alone where there is no gradient, and under ZeRO-3, which takes a backward inside of a forward for the end of it.
    """
    parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
    if not loss.requires_grad or any(hasattr(parameter, "ds_id") for parameter in parameters):
        return loss
    with full_precision(loss):  # as in a backward after the forward
        gradients = torch.autograd.grad(loss, parameters)
    return _ReadyGradients.apply(loss.detach(), gradients, *parameters)


class _ReadyGradients(torch.autograd.Function):
    """loss, its gradients for parameters, parameters → loss."""

    @staticmethod
    def forward(ctx, loss, gradients, *parameters):
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx, slope):
        return None, None, *((gradient * slope).to(gradient.dtype) for gradient in ctx.saved_tensors)


def _student_fed(model: LanguageModel, tokens: Tensor, context: SequenceContext, targets: str) -> Iterator[Pair]:
    student = teacher = model.embedding(tokens)
    for block in model.blocks:
        with torch.no_grad():
            teacher, teacher_mixed = _run_block(block, teacher, context, block.mixer.teacher, targets)
        student, student_mixed = model.recompute(_run_block, block, student, context, block.mixer, targets)
        yield (student_mixed, teacher_mixed) if targets == "mixer" else (student, teacher)


def _teacher_fed(model: LanguageModel, tokens: Tensor, context: SequenceContext, targets: str) -> Iterator[Pair]:
    hidden = model.embedding(tokens)
    for block in model.blocks:
        run = _run_both if block.parallel_residual else _run_one_after_the_other
        hidden, pair = model.recompute(run, block, hidden, context, targets)
        yield pair


def _run_block(block: Block, hidden: Tensor, context: SequenceContext, mix: Callable, targets: str) -> tuple[Tensor, Tensor | None]:
    """The block's output with `mix` as its mixer, and the mixer's own output where that is wanted."""
    mixed = []

    def watched(normed, context):
        mixed.append(mix(normed, context))
        return mixed[0]

    output = block(hidden, context, watched)
    if targets == "block":
        return output, None
    partial, bias = mixed[0]
    return output, reduce_partial_sums(partial, (bias,), block.tensor_parallel)


def _run_one_after_the_other(block: Block, hidden: Tensor, context: SequenceContext, targets: str) -> tuple[Tensor, Pair]:
    """The teacher's output, and the pair to compare."""
    with torch.no_grad():
        teacher, teacher_mixed = _run_block(block, hidden, context, block.mixer.teacher, targets)
    student, student_mixed = _run_block(block, hidden, context, block.mixer, targets)
    return teacher, (student_mixed, teacher_mixed) if targets == "mixer" else (student, teacher)


def _run_both(block: Block, hidden: Tensor, context: SequenceContext, targets: str) -> tuple[Tensor, Pair]:
    """The same for a parallel residual, where both have the same queries, keys, values and MLP branch: computed once.

    What comes in has no gradient, so no copy over the TP group is needed before the branches.
    """
    mixer, tensor_parallel = block.mixer, block.tensor_parallel
    with torch.no_grad():
        q, k, v = mixer.project(block.mixer_norm(hidden))
        fed, mlp_bias = block.mlp(block.mlp_norm(hidden))
        teacher_mixed, mixer_bias = mixer.project_out(softmax_attention(q, k, v, context))
    student_mixed, _ = mixer.project_out(mixer.linear_attention(q, k, v, context))
    if targets == "mixer":
        student, teacher = (reduce_partial_sums(mixed, (mixer_bias,), tensor_parallel) for mixed in (student_mixed, teacher_mixed))
        return hidden + teacher + reduce_partial_sums(fed, (mlp_bias,), tensor_parallel), (student, teacher)
    biases = (mixer_bias, mlp_bias)
    student, teacher = (hidden + reduce_partial_sums(mixed + fed, biases, tensor_parallel) for mixed in (student_mixed, teacher_mixed))
    return teacher, (student, teacher)
