"""Figures of a model on tasks, out of lm-eval's evaluation."""

import contextlib
import importlib.metadata
import math
import sys

import torch
from lm_eval.evaluator import evaluate

from megahedge.evaluation.lm_eval.data import LoadedTasks
from megahedge.evaluation.lm_eval.model import TaskModel
from megahedge.evaluation.models import OpenModel
from megahedge.evaluation.tasks import Metric, TaskOptions, TaskResults, TaskScore
from megahedge.utils.errors import RunError


def score_tasks(loaded: LoadedTasks, model: OpenModel, options: TaskOptions, device: torch.device | str) -> TaskResults:
    """Figures of a model that has a tokenizer on the tasks, then on the groups.

    Raises InputError for tasks that need sampling, RunError for a model whose figures are not finite.
    """
    for task in loaded.tasks.values():
        task.set_fewshot_seed(seed=options.seed)
    language_model = TaskModel(model, options.batch_size, device, loaded.place)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # which lm-eval's bootstrap prints to
            results = evaluate(
                language_model,
                {"tasks": loaded.tasks, "groups": loaded.groups},
                limit=options.limit,
                bootstrap_iters=options.bootstrap_iters,
                log_samples=True,
            )
    except OverflowError:  # of exp(nats of a row): a perplexity
        raise RunError(f"a metric of the tasks overflows on {model.source.path}: the model is broken, or has diverged") from None
    scores = tuple(_task_score(name, results, loaded) for name in [*loaded.tasks, *loaded.groups])
    return TaskResults(scores, loaded.data, importlib.metadata.version("lm-eval"))


def _task_score(name: str, results: dict, loaded: LoadedTasks) -> TaskScore:
    is_group = name in loaded.groups
    figures = results["groups" if is_group else "results"][name]
    samples = [] if is_group else results["samples"][name]
    counts = results.get("n-samples", {}).get(name)
    better = results["higher_is_better"].get(name) or {}
    metrics = []
    for key, value in figures.items():
        metric, comma, applied = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        stderr = figures.get(f"{metric}_stderr,{applied}")
        stderr = stderr if isinstance(stderr, (int, float)) and math.isfinite(stderr) else None  # of one row it is NaN
        metrics.append(
            Metric(metric, applied, float(value), stderr, better.get(metric) is not False, _row_values(samples, metric, applied, value))
        )
    scored = figures.get("sample_len") or 0
    version = results["versions"].get(name)
    return TaskScore(
        task=name,
        version=None if version is None else str(version),
        num_fewshot=results["n-shot"].get(name),
        scored_rows=int(counts["effective"] if counts else scored),
        rows=int(counts["original"] if counts else scored),
        chance=None if is_group else _chance(loaded.tasks[name], samples),
        metrics=tuple(metrics),
    )


def _row_values(samples: list[dict], metric: str, applied: str, value: float) -> tuple[float, ...] | None:
    """Each row's share of a metric, where the metric is their mean."""
    values = [sample.get(metric) for sample in samples if sample["filter"] == applied]
    if not values or not all(isinstance(item, (bool, int, float)) for item in values):
        return None
    return tuple(map(float, values)) if abs(sum(values) / len(values) - value) <= 1e-9 else None


def _chance(task, samples: list[dict]) -> float | None:
    """Mean of 1 / choices over the rows of a task of multiple choice, with one right answer each."""
    if task.OUTPUT_TYPE != "multiple_choice" or "acc_mutual_info" in task.aggregation() or not samples:
        return None
    if any(isinstance(sample["target"], list) for sample in samples):
        return None
    return sum(1 / len(sample["arguments"]) for sample in samples) / len(samples)
