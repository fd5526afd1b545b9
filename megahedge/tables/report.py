"""What came of a table's runs: figures of each row, differences between rows, and the Markdown and the curves that show them."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from megahedge.evaluation.perplexity import perplexity_of
from megahedge.tables.rows import Row, Table
from megahedge.utils.errors import InputError

CERTAIN = 2.0
"""Standard errors beyond which a difference is called one."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Of a row: validation losses in nats a token by seed, None where a run has diverged."""

    row: Row
    losses: tuple[float | None, ...]
    teacher_loss: float
    """Of the row's teacher, likewise."""
    tokens: int
    """Of both stages."""
    seconds: float
    """Wall time of the runs of one seed, on the mean; a stage 1 that rows share counts in each of them.  0 where it is not known."""

    @property
    def loss(self) -> float | None:
        """Mean over the seeds; None where one of them has diverged."""
        return None if None in self.losses else statistics.mean(self.losses)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; None where it is not known."""
        return None if self.loss is None or len(self.losses) < 2 else statistics.stdev(self.losses)

    @property
    def perplexity(self) -> float | None:
        """e to the mean loss."""
        return None if self.loss is None else perplexity_of(self.loss)

    @property
    def above_teacher(self) -> float | None:
        """Loss over the teacher's; None for the teacher itself."""
        return None if self.loss is None or not self.row.trained else self.loss - self.teacher_loss


@dataclasses.dataclass(frozen=True)
class Difference:
    """Loss of a row less that of another, in nats a token."""

    rows: tuple[Row, Row]
    value: float | None
    error: float | None
    """Standard error; None where a row has one seed."""
    share: float | None = None
    """What the first row leaves of the second's distance to the teacher; None where that is no distance, or has another teacher."""
    by_seed: tuple[float, ...] = ()
    """The same of each seed, whose runs have the order of data in common; empty where a run has diverged, or a row has no seeds."""

    @classmethod
    def of(cls, first: Result, second: Result) -> "Difference":
        """Takes all runs as independent: that two rows share the seeds' order of data, and maybe a stage 1, is not made use of."""
        value = None if None in (first.loss, second.loss) else first.loss - second.loss
        spreads = (first.spread, second.spread)
        known = None not in spreads and value is not None
        return cls(
            (first.row, second.row),
            value,
            _standard_error(first, second) if known else None,
            _share(first, second),
            _by_seed(first, second),
        )

    def sentence(self) -> str:
        """For people."""
        pair = f"{self.rows[0].model} against {self.rows[1].model}"
        if self.value is None:
            return f"{pair}: not known, as a run has diverged"
        share = "" if self.share is None else f"; leaves {self.share:.3f} of the other's distance to the teacher"
        if self.error is None:
            return f"{pair}: {self.value:+.4f}{share}; one seed says nothing of the spread"
        seeds = f" ({', '.join(f'{value:+.4f}' for value in self.by_seed)} by seed)" if self.by_seed else ""
        verdict = "a difference" if abs(self.value) > CERTAIN * self.error else "inside the spread of the seeds"
        return f"{pair}: {self.value:+.4f} ± {self.error:.4f}{seeds}, {verdict}{share}"


def _standard_error(first: Result, second: Result) -> float:
    return math.sqrt(sum(result.spread**2 / len(result.losses) for result in (first, second)))


def _by_seed(first: Result, second: Result) -> tuple[float, ...]:
    if None in (*first.losses, *second.losses) or not (first.row.trained and second.row.trained):
        return ()
    return tuple(one - other for one, other in zip(first.losses, second.losses, strict=True))


def _share(first: Result, second: Result) -> float | None:
    whole, left = second.above_teacher, first.above_teacher
    return None if None in (whole, left) or whole <= 0 or first.row.teacher != second.row.teacher else left / whole


def differences(table: Table, results: Sequence[Result]) -> list[Difference]:
    """Of the pairs that the table compares."""
    by_name = {result.row.name: result for result in results}
    return [Difference.of(by_name[first], by_name[second]) for first, second in table.compare]


def markdown(table: Table, results: Sequence[Result], origin: str) -> str:
    """The table beside the paper's numbers, `origin`, which says where it comes from, and the differences beneath it."""
    lines = [f"## {table.name}: {table.title}", "", origin, ""]
    lines += ["| row | tokens | loss | ± seeds | perplexity | above the teacher | paper | minutes |", "|---|---|---|---|---|---|---|---|"]
    lines += ["| " + " | ".join(_cells(result)) + " |" for result in results]
    if any(result.row.ours for result in results):
        lines += ["", "\\* a row of ours, which the paper does not have"]
    if table.compare:
        lines += ["", "Differences of loss:", ""] + [f"- {difference.sentence()}" for difference in differences(table, results)]
    return "\n".join(lines) + "\n"


def _cells(result: Result) -> list[str]:
    row, trained = result.row, result.row.trained
    return [
        row.model + (" \\*" if row.ours else ""),
        f"{result.tokens / 1e6:.4g}M" if trained else "",
        _show(result.loss, ".4f", "diverged"),
        _show(result.spread, ".4f"),
        _show(result.perplexity, ".2f", "diverged"),
        _show(result.above_teacher, "+.4f"),
        "" if row.paper_perplexity is None else str(row.paper_perplexity),
        f"{result.seconds / 60:.1f}" if result.seconds else "",
    ]


def _show(value: float | None, form: str, unknown: str = "") -> str:
    return unknown if value is None else format(value, form)


def as_record(table: Table, results: Sequence[Result]) -> dict:
    """All of it for other programs."""
    rows = [
        {"name": result.row.name, "model": result.row.model, "ours": result.row.ours, "paper_perplexity": result.row.paper_perplexity}
        | {"losses": list(result.losses), "loss": result.loss, "spread": result.spread, "perplexity": result.perplexity}
        | {"teacher_loss": result.teacher_loss, "tokens": result.tokens, "seconds": result.seconds}
        for result in results
    ]
    compared = [
        {"rows": [row.name for row in difference.rows], "difference": difference.value, "standard_error": difference.error}
        | {"share": difference.share, "by_seed": list(difference.by_seed)}
        for difference in differences(table, results)
    ]
    return {"table": table.name, "title": table.title, "rows": rows, "differences": compared}


# ---- curves -----------------------------------------------------------------------------------------------------------------------

Curve = list[tuple[int, float]]
"""Tokens so far, and the validation perplexity there."""


def check_plotting() -> None:
    """Raises InputError where matplotlib is missing: before the runs that a plot would be made of."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("the curves are drawn by matplotlib, which is not installed: pip install matplotlib, or --no_plot") from None


def plot(curves: dict[str, list[Curve]], teacher_perplexity: float, title: str, path: Path) -> None:
    """A line for each row, by its model, through the geometric means of its seeds; the axis of the perplexity is logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for model, seeds in curves.items():
        tokens = [point[0] for point in seeds[0]]
        means = [math.exp(statistics.mean(math.log(curve[k][1]) for curve in seeds)) for k in range(len(tokens))]
        axes.plot([count / 1e6 for count in tokens], means, marker="o", markersize=3, label=model)
    axes.axhline(teacher_perplexity, color="black", linestyle="--", linewidth=1, label="teacher")
    axes.set(xlabel="million tokens of both stages", ylabel="validation perplexity", yscale="log", title=title)
    for set_form in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_form(lambda value, _: f"{value:g}")  # in place of powers of ten
    axes.grid(which="both", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
