"""Blends: right shares at every prefix, each corpus in its own order, no dependence on the length of the run."""

import numpy as np
import pytest

from megahedge.data.blending import Blend, parse_data_path
from megahedge.utils.errors import InputError

WEIGHTS = [
    [1.0],
    [0.7, 0.3],
    [0.5, 0.5],
    [1 / 3, 1 / 3, 1 / 3],
    [0.9, 0.09, 0.009, 0.001],
    [1e-6, 1.0],
    [0.5] + [0.05] * 10,
    [1, 1, 2, 3, 5, 8, 13, 21, 34, 55],
    np.random.default_rng(0).random(30).tolist(),
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: f"{len(weights)}-{weights[0]:.3g}")
def test_shares_hold_at_every_prefix_and_each_corpus_counts_up(weights):
    blend = Blend(weights)
    shares = np.array(weights) / np.sum(weights)
    served = np.zeros(len(weights), np.int64)
    worst = 0.0
    for position in range(5000):
        corpus, place = blend.locate(position)
        assert place == served[corpus]
        served[corpus] += 1
        worst = max(worst, np.abs(served - shares * (position + 1)).max())
    assert blend.counts(5000) == served.tolist()
    # 1e-9: rounding of the shares here; Blend itself counts in fractions
    assert worst <= 1.0 + 1e-9


def test_far_positions_are_found_without_counting_up_to_them():
    blend = Blend([0.123456, 0.5, 0.376544])
    for position in (10**7, 10**12, 10**15 + 1):
        before, after = blend.counts(position), blend.counts(position + 1)
        corpus, place = blend.locate(position)
        assert [b - a for a, b in zip(before, after, strict=True)] == [int(index == corpus) for index in range(3)]
        assert place == before[corpus]


def test_scaling_the_weights_changes_nothing():
    assert [Blend([0.7, 0.3]).locate(q) for q in range(1000)] == [Blend([7, 3]).locate(q) for q in range(1000)]


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [-1.0, 2.0], [float("nan")], [float("inf"), 1.0]])
def test_bad_weights_are_refused(weights):
    with pytest.raises(InputError):
        Blend(weights)


@pytest.mark.parametrize(
    ("data_path", "expected"),
    [
        ("data/owt", [(1.0, "data/owt")]),
        ("with blank/owt", [(1.0, "with blank/owt")]),
        (["data/owt"], [(1.0, "data/owt")]),
        (("0.7", "a", "0.3", "b"), [(0.7, "a"), (0.3, "b")]),
        ("0.7 a 0.3 b", [(0.7, "a"), (0.3, "b")]),
        (["0.7 a 0.3 b"], [(0.7, "a"), (0.3, "b")]),
    ],
)
def test_data_path_forms(data_path, expected):
    assert parse_data_path(data_path) == expected


@pytest.mark.parametrize(
    "data_path",
    [
        "",
        [],
        ["a", "b"],
        "0.7 a 0.3",
        ["a", "0.7"],
        "1 a 1 a",
        "0 a 1 b",
        "-1 a 1 b",
        "nan a 1 b",
        "1e999999999 a 1 b",
        "1e-999999999 a 1 b",
    ],
)
def test_bad_data_path_is_refused(data_path):
    with pytest.raises(InputError, match=r"^--data_path"):
        parse_data_path(data_path)
