"""Losses straight from hidden states are those of the logits, and the logits of all tokens are never held."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megahedge.parallel import head_loss
from megahedge.parallel.head_loss import Distillation, head_losses
from megahedge.parallel.loss import vocab_parallel_kl, vocab_parallel_token_losses
from megahedge.parallel.topology import TensorParallel
from megahedge.utils.labels import IGNORE_INDEX

SINGLE = TensorParallel()
VOCAB, PADDED, WIDTH = 29, 32, 6
SHAPE = (2, 7)


@pytest.fixture(params=[1, 5 * PADDED, 1 << 24], ids=["a token at a time", "blocks of 5", "all at once"])
def block_logits(request, monkeypatch):
    monkeypatch.setattr(head_loss, "BLOCK_LOGITS", request.param)


def inputs(dtype=torch.float64):
    """Hidden states of student and teacher, the head's weight with rows of padding, labels of which two are not scored."""
    generator = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(*SHAPE, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    weight = torch.randn(PADDED, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCAB, SHAPE, generator=generator)
    labels[0, 0] = labels[1, 3] = IGNORE_INDEX
    return hidden.requires_grad_(), weight, labels, teacher


def by_logits(hidden, weight, labels, distillation):
    """Loss, cross-entropy and divergence by the functions that take logits."""
    logits = F.linear(hidden, weight)
    cross_entropy = vocab_parallel_token_losses(logits, labels, VOCAB, SINGLE)
    if distillation is None:
        return cross_entropy, cross_entropy, None
    teacher = F.linear(distillation.teacher_hidden, weight)
    divergence = vocab_parallel_kl(teacher, logits, VOCAB, SINGLE, distillation.temperature)
    return (1 - distillation.alpha) * cross_entropy + distillation.alpha * divergence, cross_entropy, divergence


@pytest.mark.parametrize("trains", [False, True], ids=["frozen head", "head that trains"])
@pytest.mark.parametrize("share", [None, (0.7, 1.0), (0.4, 2.0), (1.0, 1.0)], ids=str)
def test_losses_and_gradients_are_those_of_the_logits(share, trains, block_logits):
    slope = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for compute in (lambda *arguments: head_losses(*arguments[:3], VOCAB, SINGLE, arguments[3]), by_logits):
        hidden, weight, labels, teacher = inputs()
        weight.requires_grad_(trains)
        losses = compute(hidden, weight, labels, share and Distillation(teacher, *share))
        gradients = torch.autograd.grad((losses[0] * slope).sum(), [hidden, *([weight] if trains else [])])
        found.append([*(loss for loss in losses if loss is not None), *gradients])
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)  # the same sums in fp64


def test_the_parts_have_no_gradient():
    hidden, weight, labels, teacher = inputs()
    loss, *parts = head_losses(hidden, weight, labels, VOCAB, SINGLE, Distillation(teacher, 0.5))
    assert loss.requires_grad and not any(part.requires_grad for part in parts)


def test_a_student_that_is_its_teacher_has_no_divergence():
    hidden, weight, labels, _ = inputs(torch.float32)
    loss, _, divergence = head_losses(hidden, weight, labels, VOCAB, SINGLE, Distillation(hidden, 1.0))
    (gradient,) = torch.autograd.grad(loss.sum(), hidden)
    assert not divergence.any() and not gradient.any()


def test_bf16_losses_are_in_fp32_and_near():
    hidden, weight, labels, teacher = inputs(torch.bfloat16)
    loss, *_ = head_losses(hidden, weight, labels, VOCAB, SINGLE, Distillation(teacher, 0.5))
    (gradient,) = torch.autograd.grad(loss.sum(), hidden)
    assert loss.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    expected, *_ = by_logits(hidden, weight, labels, Distillation(teacher, 0.5))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), hidden)[0], rtol=2e-2, atol=2e-2)  # bf16 rounds to 4e-3


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation has made."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("grad", [True, False])
def test_no_tensor_has_the_logits_of_all_tokens(grad, monkeypatch):
    monkeypatch.setattr(head_loss, "BLOCK_LOGITS", 4 * PADDED)
    hidden, weight, labels, teacher = inputs()
    with torch.set_grad_enabled(grad), Largest() as largest:
        loss, *_ = head_losses(hidden, weight, labels, VOCAB, SINGLE, Distillation(teacher, 0.5))
        if grad:
            loss.sum().backward()
    assert largest.elements == max(4 * PADDED, PADDED * WIDTH)
