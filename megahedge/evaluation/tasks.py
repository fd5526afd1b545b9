"""Scores of tasks: what was asked, what came out, and two models side by side."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from megahedge.utils.errors import InputError

PAPER = "paper"
PAPER_METRICS = {
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "social_iqa": "acc",
    "piqa": "acc",
    "hellaswag": "acc_norm",
    "lambada_openai": "acc",
    "boolq": "acc",
    "race": "acc",
    "logiqa": "acc",
    "winogrande": "acc",
}
"""The tasks of Attention to Mamba (arXiv 2604.14191) under lm-eval's names, and the metric that the paper gives of each.

Of LAMBADA lm-eval has two texts; the paper does not say which it took, so its figure may be that of lambada_standard.
"""


def expand_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names of tasks with `paper` replaced by its ten, each name once.  Raises InputError for an empty name."""
    if any(not name.strip() for name in names):
        raise InputError("--tasks holds an empty name; name tasks of lm-eval, or `paper` for the ten of the paper")
    expanded = [task for name in names for task in (PAPER_METRICS if name == PAPER else (name,))]
    return tuple(dict.fromkeys(expanded))


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """How tasks are put to a model."""

    batch_size: int
    """Inputs of the greatest length per forward; changes no figure."""
    limit: int | None
    """The first so many rows of each task are scored; None for all."""
    bootstrap_iters: int
    """Resamplings behind the standard error of metrics that are no means."""
    seed: int
    """Of the choice of worked examples, the same for every model."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """One figure of a task, as lm-eval computes it."""

    name: str
    filter: str
    """lm-eval's name of what was done to the model's answers before; `none` for nothing."""
    value: float
    stderr: float | None
    """Standard error: in closed form for means, by bootstrap for other metrics; None where lm-eval knows none."""
    higher_is_better: bool
    rows: tuple[float, ...] | None = None
    """Values that `value` is the mean of, in the order of the rows; None for other metrics."""

    @property
    def label(self) -> str:
        """Name of the metric within its task."""
        return self.name if self.filter == "none" else f"{self.name},{self.filter}"


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """A model's figures on a task, or the aggregate of a group of tasks."""

    task: str
    version: str | None
    num_fewshot: int | None
    scored_rows: int
    rows: int
    """Rows that the task has."""
    chance: float | None
    """Accuracy of guessing, from the number of choices of each row; None for tasks without choices."""
    metrics: tuple[Metric, ...]

    def record(self) -> dict:
        """For JSON."""
        metrics = {
            metric.label: {"value": metric.value, "stderr": metric.stderr, "higher_is_better": metric.higher_is_better}
            for metric in self.metrics
        }
        rest = {name: getattr(self, name) for name in ("version", "num_fewshot", "scored_rows", "rows", "chance")}
        return {**rest, "metrics": metrics}


@dataclasses.dataclass(frozen=True)
class TaskResults:
    """What a model made of all tasks."""

    scores: tuple[TaskScore, ...]
    data: dict[str, dict]
    """By task: where its rows come from, for local files with their digest."""
    lm_eval: str
    """Version of the package."""

    def record(self) -> dict:
        """For JSON."""
        scores = {
            score.task: score.record() | ({"data": self.data[score.task]} if score.task in self.data else {}) for score in self.scores
        }
        return {"lm_eval": self.lm_eval, "scores": scores}


@dataclasses.dataclass(frozen=True)
class Difference:
    """A model's metric against another model's."""

    value: float
    """Model minus other."""
    stderr: float | None
    """Of the difference, over rows as pairs, which is far below that of two models on two sets of rows; None for what is no mean."""
    ratio: float | None
    """Model over other; None over 0."""


def compare_metrics(model: Metric, other: Metric) -> Difference:
    """The difference between two models on the same rows."""
    stderr = None
    if model.rows is not None and other.rows is not None and len(model.rows) == len(other.rows) > 1:
        pairs = [ours - theirs for ours, theirs in zip(model.rows, other.rows, strict=True)]
        stderr = statistics.stdev(pairs) / math.sqrt(len(pairs))
    return Difference(model.value - other.value, stderr, model.value / other.value if other.value else None)


def compare_results(model: TaskResults, other: TaskResults) -> dict[str, dict]:
    """For JSON: the differences of each metric of each task."""
    compared = {}
    for ours, theirs in zip(model.scores, other.scores, strict=True):
        pairs = zip(ours.metrics, theirs.metrics, strict=True)
        compared[ours.task] = {first.label: dataclasses.asdict(compare_metrics(first, second)) for first, second in pairs}
    return compared


def tasks_table(names: Sequence[str], model: TaskResults, teacher: TaskResults | None = None) -> str:
    """For people: a line for each metric; where `paper` is asked for, of its tasks the paper's metric alone, and their mean."""
    shown = [
        (score, metric, teacher.scores[position].metrics[index] if teacher else None)
        for position, score in enumerate(model.scores)
        for index, metric in enumerate(score.metrics)
        if PAPER not in names or PAPER_METRICS.get(score.task, metric.name) == metric.name
    ]
    lines = [["task", "metric", "rows", "shots", "chance", "model", *(["teacher", "difference"] if teacher else [])]]
    lines += [_line(*row) for row in shown]
    if PAPER in names:
        lines.append(_mean_line([row for row in shown if row[0].task in PAPER_METRICS]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    difference = "; difference: model - teacher, its error over rows as pairs, or x model / teacher" if teacher else ""
    return f"{table}\nlm-eval {model.lm_eval}; ± standard error over rows{difference}"


def _mean_line(rows: Sequence[tuple[TaskScore, Metric, Metric | None]]) -> list[str]:
    means = [statistics.fmean(metric.value for _, metric, _ in rows)]
    if rows[0][2] is not None:
        means.append(statistics.fmean(other.value for _, _, other in rows if other is not None))
    compared = [f"{means[0] - means[1]:+.4f}"] if len(means) == 2 else []
    return [f"mean of {len(rows)}", "", "", "", "-", *(f"{mean:.4f}" for mean in means), *compared]


def _line(score: TaskScore, metric: Metric, other: Metric | None) -> list[str]:
    is_accuracy = metric.rows is not None and metric.name.startswith("acc")
    chance = f"{score.chance:.3f}" if score.chance is not None and is_accuracy else "-"
    rows = str(score.scored_rows) if score.scored_rows == score.rows else f"{score.scored_rows} of {score.rows}"
    shots = "-" if score.num_fewshot is None else str(score.num_fewshot)
    cells = [score.task, metric.label, rows, shots, chance, _with_error(metric.value, metric.stderr)]
    if other is None:
        return cells
    difference = compare_metrics(metric, other)
    if metric.higher_is_better or difference.ratio is None:
        shown = _with_error(difference.value, difference.stderr, "+")
    else:
        shown = f"x {difference.ratio:.4g}"
    return [*cells, _with_error(other.value, other.stderr), shown]


def _with_error(value: float, stderr: float | None, sign: str = "") -> str:
    shown = f"{value:{sign}.4f}" if abs(value) < 10 else f"{value:{sign}.6g}"
    return shown if stderr is None else f"{shown} ± {stderr:.4f}" if stderr < 10 else f"{shown} ± {stderr:.3g}"
