"""Cross-entropy and KL on one rank are PyTorch's; what they promise about masks, dtypes and zero."""

import pytest
import torch
import torch.nn.functional as F

from megahedge.parallel.loss import IGNORE_INDEX, vocab_parallel_cross_entropy, vocab_parallel_kl, vocab_parallel_token_losses
from megahedge.parallel.topology import TensorParallel

SINGLE = TensorParallel()
VOCAB = 97


def logits_and_labels(seed: int = 0, scale: float = 5.0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(3, 7, VOCAB, generator=generator)).to(dtype).requires_grad_()
    return logits, torch.randint(0, VOCAB, (3, 7), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy_and_gradient_match_pytorch_in_fp32(dtype):
    logits, labels = logits_and_labels(dtype=dtype)
    labels[0, :3] = IGNORE_INDEX
    loss = vocab_parallel_cross_entropy(logits, labels, VOCAB, SINGLE)
    wide = logits.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    reference = F.cross_entropy(wide.flatten(0, 1), labels.flatten())
    assert loss.dtype == wide.dtype
    torch.testing.assert_close(loss, reference)
    torch.testing.assert_close(
        torch.autograd.grad(loss, logits)[0],
        torch.autograd.grad(reference, wide)[0].to(dtype),
        rtol=1e-2 if dtype == torch.bfloat16 else 1e-5,
        atol=1e-7,
    )  # bf16: the gradient's own rounding, 2^-8


def test_token_losses_are_zero_where_ignored():
    logits, labels = logits_and_labels()
    labels[1] = IGNORE_INDEX
    losses = vocab_parallel_token_losses(logits, labels, VOCAB, SINGLE)
    assert losses.shape == labels.shape and (losses[1] == 0).all() and (losses[0] > 0).all()
    losses.sum().backward()
    assert not logits.grad[1].any() and logits.grad[0].any()


def test_all_ignored_gives_zero_and_finite_gradients():
    logits, labels = logits_and_labels()
    loss = vocab_parallel_cross_entropy(logits, torch.full_like(labels, IGNORE_INDEX), VOCAB, SINGLE)
    loss.backward()
    assert loss == 0 and not logits.grad.any()


@pytest.mark.parametrize("repeat", [2, 5])
def test_copying_the_batch_changes_no_loss(repeat):
    logits, labels = logits_and_labels()
    labels[2, 3:] = IGNORE_INDEX
    once = vocab_parallel_cross_entropy(logits, labels, VOCAB, SINGLE)
    torch.testing.assert_close(vocab_parallel_cross_entropy(logits.repeat(repeat, 1, 1), labels.repeat(repeat, 1), VOCAB, SINGLE), once)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_kl_and_gradient_match_pytorch(temperature):
    teacher, _ = logits_and_labels(1)
    student, _ = logits_and_labels(2)
    kl = vocab_parallel_kl(teacher, student, VOCAB, SINGLE, temperature)
    student_log, teacher_log = ((logits / temperature).log_softmax(-1) for logits in (student, teacher.detach()))
    reference = F.kl_div(student_log, teacher_log, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(kl, reference)
    weights = torch.rand(3, 7, generator=torch.Generator().manual_seed(3))
    ours = torch.autograd.grad((kl * weights).sum(), student)[0]
    torch.testing.assert_close(ours, torch.autograd.grad((reference * weights).sum(), student)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kl_of_equal_logits_is_exactly_zero_and_never_pulls_the_teacher(dtype):
    logits, _ = logits_and_labels(dtype=dtype)
    teacher = logits.detach().clone().requires_grad_()
    kl = vocab_parallel_kl(teacher, logits, VOCAB, SINGLE)
    kl.sum().backward()
    assert not kl.any() and not logits.grad.any() and teacher.grad is None


@pytest.mark.parametrize("spread", [1e-2, 1e-3, 1e-4])
def test_small_kl_is_exact_to_a_percent_and_never_negative(spread):
    """Sums of p log(p / q) are wrong by 1e-6 in fp32: more than the whole of these divergences (5e-5, 5e-7, 5e-9)."""
    teacher, _ = logits_and_labels(1)
    student = teacher + spread * torch.randn(teacher.shape, generator=torch.Generator().manual_seed(4))
    reference = F.kl_div(student.double().log_softmax(-1), teacher.double().log_softmax(-1), log_target=True, reduction="none").sum(-1)
    ours = vocab_parallel_kl(teacher, student, VOCAB, SINGLE)
    assert (ours >= 0).all()
    # fp32 differences of log-probabilities near 10 are wrong by 1e-6: 1e-6 / 1e-4 of them where the spread is smallest
    torch.testing.assert_close(ours.double(), reference, rtol=0.03 if spread == 1e-4 else 0.005, atol=0)


def test_extreme_logits_stay_finite():
    logits, labels = logits_and_labels(scale=1e4)
    loss = vocab_parallel_cross_entropy(logits, labels, VOCAB, SINGLE) + vocab_parallel_kl(logits.flip(-1), logits, VOCAB, SINGLE).mean()
    loss.backward()
    assert loss.isfinite() and logits.grad.isfinite().all()
