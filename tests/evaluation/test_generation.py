"""Sampling follows its options and its seed."""

import pytest
import torch

from megahedge.evaluation.generation import GenerateOptions, choose, sample
from megahedge.utils.errors import InputError

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def options(**changes) -> GenerateOptions:
    return GenerateOptions(model="m", prompt="p", **changes)


def drawn(**changes) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {choose(LOGITS, options(**changes), generator) for _ in range(300)}


def test_temperature_zero_takes_the_likeliest():
    assert drawn(temperature=0.0) == {1}


def test_top_k_and_top_p_leave_the_unlikely_out():
    assert drawn(temperature=1.0, top_p=1.0) == {0, 1, 2, 3, 4}
    assert drawn(temperature=1.0, top_p=1.0, top_k=2) == {1, 3}
    assert drawn(temperature=1.0, top_p=0.9) == {1, 3, 2}  # 0.64, 0.24, 0.09, 0.03, 0.01
    assert drawn(temperature=1.0, top_p=0.01) == {1}


def test_frequencies_are_those_of_the_softmax():
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([choose(LOGITS, options(temperature=2.0, top_p=1.0), generator) for _ in range(4000)])
    frequencies = torch.bincount(draws, minlength=5) / 4000
    assert (frequencies - (LOGITS / 2).softmax(-1)).abs().max() < 0.03  # three standard deviations of 4000 draws are 0.024


def test_the_model_sees_all_tokens_so_far_and_the_seed_decides():
    seen = []

    def logits(tokens):
        seen.append(tokens.shape[1])
        return torch.zeros(1, tokens.shape[1], 50)

    first, again, other = (list(sample(logits, torch.ones(1, 3, dtype=torch.int64), options(max_new_tokens=6, seed=s))) for s in (1, 1, 2))
    assert seen[:6] == [3, 4, 5, 6, 7, 8]
    assert first == again != other


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": -1.0}, "--temperature=-1.0"),
        ({"top_p": 0.0}, "--top_p=0.0"),
        ({"max_new_tokens": 0}, "--max_new_tokens=0"),
        ({"top_k": -1}, "--top_k=-1"),
    ],
)
def test_bad_options_are_refused(changes, said):
    with pytest.raises(InputError, match=said):
        options(**changes)
