"""The losses between hidden states are their formulas, and keep their digits where student and teacher nearly agree."""

import pytest
import torch
import torch.nn.functional as F

from megahedge.distill.losses import LOSSES, cosine_and_mse, cosine_loss, relative_mse


def states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_cosine_loss_is_one_minus_the_cosine_of_each_token():
    student, teacher = (states(2, 5, 7, seed=seed) * states(2, 5, 1, seed=9).exp() for seed in (0, 1))
    student.requires_grad_()
    loss, expected = cosine_loss(student, teacher), (1 - F.cosine_similarity(student, teacher, dim=-1)).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(loss, student)
    (expected_gradient,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


def test_cosine_loss_keeps_its_digits_where_both_nearly_agree():
    """1 − cos of fp32 vectors that differ by 1e-5 is 0 or rubbish; half the squared distance of the unit vectors is not."""
    teacher = states(2, 5, 64).float()
    student = teacher + 1e-5 * states(2, 5, 64, seed=1).float()
    exact = (1 - F.cosine_similarity(student.double(), teacher.double(), dim=-1)).mean()
    assert exact < 1e-9
    # the unit vectors are rounded to 6e-8, 0.6 % of their distance
    assert abs(cosine_loss(student, teacher).item() / exact.item() - 1) < 0.02
    naive = (1 - F.cosine_similarity(student, teacher, dim=-1)).mean()
    assert abs(naive.item() / exact.item() - 1) > 0.1


def test_cosine_loss_sees_direction_alone():
    student, teacher = states(2, 5, 7), states(2, 5, 7, seed=1)
    torch.testing.assert_close(cosine_loss(3 * student, 0.2 * teacher), cosine_loss(student, teacher))
    assert cosine_loss(2 * teacher, teacher) < 1e-15
    assert cosine_loss(-teacher, teacher).item() == pytest.approx(2)


def test_relative_mse_is_the_squared_distance_over_the_teachers_square_token_by_token():
    student, teacher = states(2, 5, 7), states(2, 5, 7, seed=1)
    of_tokens = [
        F.mse_loss(student[row, token], teacher[row, token]) / teacher[row, token].square().mean() for row in range(2) for token in range(5)
    ]
    torch.testing.assert_close(relative_mse(student, teacher), torch.stack(of_tokens).mean())
    assert relative_mse(teacher, teacher) == 0
    assert relative_mse(2 * teacher, teacher).item() == pytest.approx(1)


def test_relative_mse_weighs_layers_of_any_scale_alike():
    student, teacher = states(2, 5, 7), states(2, 5, 7, seed=1)
    torch.testing.assert_close(relative_mse(100 * student, 100 * teacher), relative_mse(student, teacher))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_does_not_depend_on_how_a_batch_was_cut(name):
    student, teacher = states(2, 5, 7), states(2, 5, 7, seed=1) * torch.tensor([1.0, 100.0]).view(2, 1, 1)
    of_rows = torch.stack([LOSSES[name](student[row : row + 1], teacher[row : row + 1]) for row in range(2)])
    torch.testing.assert_close(LOSSES[name](student, teacher), of_rows.mean())


def test_their_sum_is_their_sum():
    student, teacher = states(2, 5, 7), states(2, 5, 7, seed=1)
    assert cosine_and_mse(student, teacher) == cosine_loss(student, teacher) + relative_mse(student, teacher)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_of_bf16_states_are_computed_in_fp32(loss):
    student, teacher = states(2, 5, 64).bfloat16(), states(2, 5, 64, seed=1).bfloat16()
    student.requires_grad_()
    found = loss(student, teacher)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(loss(student.double(), teacher.double()).item(), rel=1e-6)
    found.backward()
    assert student.grad.dtype == torch.bfloat16 and student.grad.any()
