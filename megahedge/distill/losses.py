"""How far a student's hidden states are from its teacher's.  All in fp32: both losses cancel in bf16."""

# b batch, t seq_len, d hidden_size

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from megahedge.utils.precision import widen


def cosine_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """1 − cos of each token's vectors, mean over tokens (Attention to Mamba, section 4); student, teacher [b, t, d] → scalar.

    As half the squared distance of the unit vectors, which does not cancel where they nearly agree.
    """
    student, teacher = (F.normalize(states, dim=-1) for states in widen(student, teacher))
    return 0.5 * (student - teacher).square().sum(-1).mean()


def relative_mse(student: Tensor, teacher: Tensor) -> Tensor:
    """‖student − teacher‖² / ‖teacher‖² over all tokens, so that layers of any scale weigh the same; [b, t, d] → scalar."""
    student, teacher = widen(student, teacher)
    return (student - teacher).square().sum() / teacher.square().sum()


def cosine_and_mse(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum of both: direction, and scale as well."""
    return cosine_loss(student, teacher) + relative_mse(student, teacher)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": cosine_loss, "mse": relative_mse, "cosine_mse": cosine_and_mse}
"""By the name of --match_loss."""
