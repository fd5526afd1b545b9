"""Tables made of losses: means, spreads and differences, beside the paper's numbers."""

import math

import pytest

from megahedge.tables.report import Difference, Result, as_record, differences, markdown, plot
from megahedge.tables.rows import Row, Table


def row(name: str, **changes) -> Row:
    base = {"model": name.title(), "teacher": "t", "recipe": "paper", "budget": 1.0, "stage1_share": 0.5, "rate_factor": 1.0}
    return Row(name=name, **base | {"separate_rate": False, "ours": False, "stage1": {}, "stage2": {}} | changes)


def result(name: str, *losses: float | None, **changes) -> Result:
    return Result(row(name, **changes), losses, teacher_loss=3.0, tokens=500_000, seconds=90.0)


LEAVES = "; leaves {:.3f} of the other's distance to the teacher"
TABLE = Table(name="table2", title="Parts", rows=(row("teacher"), row("gate"), row("conv")), compare=(("gate", "conv"),))
TEACHER = Result(row("teacher", trained=False, paper_perplexity=13.86), (3.0,), teacher_loss=3.0, tokens=0, seconds=0.0)


def test_a_row_shows_mean_and_spread_beside_the_paper():
    results = [TEACHER, result("gate", 3.2, 3.4, paper_perplexity=14.58), result("conv", 3.5, 3.5, ours=True)]
    cells = [line.strip("| ").split(" | ") for line in markdown(TABLE, results, "made by hand").splitlines() if line.startswith("|")]
    lines = {first: rest for first, *rest in cells}
    assert lines["Teacher"] == ["", "3.0000", "", "20.09", "", "13.86"]
    assert lines["Gate"] == ["0.5M", "3.3000", "0.1414", "27.11", "+0.3000", "14.58", "1.5"]
    assert lines["Conv \\*"][:5] == ["0.5M", "3.5000", "0.0000", "33.12", "+0.5000"]


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        # standard errors: sqrt((0.1414^2 + 0.1414^2) / 2) = 0.1414, and 0.0141 with a tenth of the spread
        (
            (3.2, 3.4),
            (3.3, 3.5),
            "-0.1000 ± 0.1414 (-0.1000, -0.1000 by seed), inside the spread of the seeds" + LEAVES.format(0.75),
        ),
        (
            (3.29, 3.31),
            (3.39, 3.41),
            "-0.1000 ± 0.0141 (-0.1000, -0.1000 by seed), a difference" + LEAVES.format(0.75),
        ),
        (
            (3.3, 3.3),
            (3.3, 3.3),
            "+0.0000 ± 0.0000 (+0.0000, +0.0000 by seed), inside the spread of the seeds" + LEAVES.format(1.0),
        ),
        ((3.3,), (3.4,), "-0.1000" + LEAVES.format(0.75) + "; one seed says nothing of the spread"),
        ((3.3, None), (3.4, 3.4), "not known, as a run has diverged"),
    ],
)
def test_a_difference_is_called_one_beyond_the_spread_of_the_seeds_only(first, second, told):
    sentence = Difference.of(result("gate", *first), result("conv", *second)).sentence()
    assert sentence == "Gate against Conv: " + told


def test_no_share_is_told_of_what_is_no_distance_or_of_another_teachers():
    better, other = result("gate", 2.9, 2.9), result("conv", 3.2, 3.2, teacher="u")
    assert Difference.of(result("conv", 3.2, 3.2), better).share is None  # already below the teacher
    assert Difference.of(result("gate", 3.1, 3.1), other).share is None
    assert Difference.of(TEACHER, other).share is None


def test_a_run_that_diverged_is_a_row_without_figures():
    results = [TEACHER, result("gate", 3.2, None), result("conv", 3.5, 3.7)]
    assert "| Gate | 0.5M | diverged |  | diverged |" in markdown(TABLE, results, "made by hand")
    record = as_record(TABLE, results)
    assert (record["rows"][1]["losses"], record["rows"][1]["loss"]) == ([3.2, None], None)
    assert record["differences"] == [{"rows": ["gate", "conv"], "difference": None, "standard_error": None, "share": None, "by_seed": []}]
    assert differences(TABLE, results)[0].value is None


def test_curves_are_drawn_through_the_means_of_the_seeds(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    drawn = []
    original = pyplot.Axes.plot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyplot.Axes, "plot", lambda axes, x, y, **settings: drawn.append((x, y)) or original(axes, x, y, **settings))
        seeds = [[(1_000_000, 20.0), (2_000_000, 10.0)], [(1_000_000, 80.0), (2_000_000, 10.0)]]
        plot({"10/90": seeds}, 5.0, "splits", tmp_path / "curves.svg")
    [(x, y)] = drawn
    assert x == [1.0, 2.0] and y == pytest.approx([math.sqrt(20 * 80), 10.0])
    assert "<!-- 10/90 -->" in (tmp_path / "curves.svg").read_text()  # matplotlib names what it draws as outlines
