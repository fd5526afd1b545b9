"""How far a student's hidden states are from its teacher's.  All in fp32: both losses cancel in bf16."""

# b batch, t seq_len, d hidden_size

from collections.abc import Callable

import torch
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
    """‖student − teacher‖² / ‖teacher‖² of each token, mean over tokens; [b, t, d] → scalar.

    Layers of any scale weigh the same, and so does a token in whatever micro-batch it is.
    """
    student, teacher = widen(student, teacher)
    least = torch.finfo(teacher.dtype).tiny
    return ((student - teacher).square().sum(-1) / teacher.square().sum(-1).clamp(min=least)).mean()


def cosine_and_mse(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum of both: direction, and scale as well."""
    return cosine_loss(student, teacher) + relative_mse(student, teacher)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": cosine_loss, "mse": relative_mse, "cosine_mse": cosine_and_mse}
"""By the name of --match_loss."""
