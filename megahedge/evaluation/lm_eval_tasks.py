"""lm-eval's tasks on our models: the one file that knows lm-eval, which is optional.

Prompts, metrics and standard errors are lm-eval's own; tokenisation follows the rules of its `hf` model, so that the figures agree.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib.metadata
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import yaml

from megahedge.evaluation.continuations import ContinuationScorer
from megahedge.evaluation.models import OpenModel
from megahedge.evaluation.tasks import Metric, TaskResults, TaskScore
from megahedge.utils.errors import InputError
from megahedge.utils.files import sha256_file
from megahedge.utils.logging import get_logger

try:
    from lm_eval.api.model import TemplateLM
except ImportError as error:
    _why_missing: ImportError | None = error
    TemplateLM = object
else:
    _why_missing = None

logger = get_logger(__name__)
logging.getLogger("lm_eval.api.task").setLevel(logging.ERROR)  # its warnings are for authors of task files

DEFAULT_MAX_LENGTH = 2048
"""Where a model's config names no longest sequence; the value of lm-eval's `hf` model."""
_MAX_NEW_TOKENS = 256
"""Where a task does not say how much may be generated; the value of lm-eval's `hf` model."""
_LOCAL_FORMATS = ("json", "csv", "parquet", "text")
_GREEDY_OPTIONS = {"do_sample", "temperature", "top_k", "top_p"}
"""Options of generation that change nothing when the likeliest token is always taken."""


class TaskModel(TemplateLM):
    """An opened model as lm-eval wants it."""

    def __init__(self, model: OpenModel, batch_size: int, device: torch.device | str):
        super().__init__()
        self.tokenizer = model.tokenizer
        self.scorer = ContinuationScorer(model.logits, model.max_seq_len or DEFAULT_MAX_LENGTH, batch_size, device)

    @property
    def eot_token_id(self) -> int:
        """End of text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        return self.tokenizer.eos_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; special tokens as the tokenizer adds them by itself (GPT-NeoX: none), never twice."""
        if add_special_tokens is None:
            if not string.startswith(self.tokenizer.decode([self.prefix_token_id])):
                return self.tokenizer.encode(string)
            add_special_tokens = False
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def loglikelihood(self, requests: list, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Scores of (context, continuation); lm-eval splits them into tokens, and calls the next method."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
        return self.scorer.score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of whole texts, in windows of the model's length that score each token once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, owners = [], []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.scorer.max_length, context_len=1):
                windows.append(make_disjoint_window(window))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (log_likelihood, _) in zip(owners, self.scorer.score(windows), strict=True):
            sums[owner] += log_likelihood
        return sums

    def generate_until(self, requests: list, disable_tqdm: bool = True) -> list[str]:
        """Greedy text up to the first stop string."""
        texts = [""] * len(requests)
        for (max_new_tokens, until), members in _by_generation(requests, self.tokenizer.decode([self.eot_token_id])).items():
            contexts = [self.tok_encode(requests[index].args[0]) for index in members]
            written = self.scorer.write(contexts, max_new_tokens, lambda tokens, until=until: self._stops(tokens, until))
            for index, tokens in zip(members, written, strict=True):
                texts[index] = _before(self.tokenizer.decode(tokens, skip_special_tokens=True), until)
        return texts

    def _stops(self, tokens: list[int], until: tuple[str, ...]) -> bool:
        if tokens[-1] == self.eot_token_id:
            return True
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return any(stop in text for stop in until)


def _by_generation(requests: list, end_of_text: str) -> dict[tuple[int, tuple[str, ...]], list[int]]:
    """Numbers of the requests by (most tokens, stop strings).  Raises InputError for tasks that want more than greedy generation."""
    from lm_eval.models.utils import normalize_gen_kwargs

    groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for index, request in enumerate(requests):
        options = dict(normalize_gen_kwargs(request.args[1], _MAX_NEW_TOKENS))
        most, until = options.pop("max_gen_toks"), options.pop("until", None) or []
        others = set(options) if options.get("do_sample") else set(options) - _GREEDY_OPTIONS
        if others:
            raise InputError(
                f"task {request.task_name} generates with {', '.join(sorted(others))}; only greedy generation is supported here"
            )
        stops = [until] if isinstance(until, str) else list(until)
        groups.setdefault((most, tuple(stop for stop in dict.fromkeys([*stops, end_of_text]) if stop)), []).append(index)
    return groups


def _before(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stop strings."""
    for stop in stops:
        text = text.split(stop)[0]
    return text


def check_installed() -> None:
    """Raise InputError where lm-eval cannot be imported."""
    if _why_missing is not None:
        raise InputError(f"--tasks needs lm-eval ({_why_missing}); install it with `pip install -c constraints.txt -e .[eval]`")


@contextlib.contextmanager
def _no_downloads() -> Iterator[None]:
    """Keep the Hugging Face libraries from the network.

    They read HF_HUB_OFFLINE and HF_DATASETS_OFFLINE once, when they are imported, and by now they are: hence their constants.
    """
    import datasets

    flags = [(huggingface_hub.constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE"), (datasets.config, "HF_DATASETS_OFFLINE")]
    before = [getattr(module, name) for module, name in flags]
    for module, name in flags:
        setattr(module, name, True)
    datasets.disable_progress_bars()  # one for each file, and local files take no time
    try:
        yield
    finally:
        datasets.enable_progress_bars()
        for (module, name), value in zip(flags, before, strict=True):
            setattr(module, name, value)


@dataclasses.dataclass(frozen=True)
class LoadedTasks:
    """Tasks of lm-eval with their rows."""

    tasks: dict[str, Any]
    """By name."""
    groups: dict[str, Any]
    data: dict[str, dict]
    """By task: where its rows come from."""


@contextlib.contextmanager
def load_tasks(names: Sequence[str], include_path: str | None = None, offline_data: str | None = None) -> Iterator[LoadedTasks]:
    """Load tasks, groups or tags by name; within `with`, as rows are mapped from files of a temporary folder.

    include_path: folder of a user's own task files, which win over lm-eval's of the same name.
    offline_data: folder of JSON lines that take the place of each task's data set; nothing is downloaded.
    Raises InputError for unknown names and for rows that cannot be had.
    """
    check_installed()
    manager = _task_manager(names, include_path)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="megahedge-tasks-"))
        files: dict[str, Path] = {}
        if offline_data is not None:
            stack.enter_context(_no_downloads())
            names = _leaf_names(names, manager)
            files = _offline_files(names, manager, Path(offline_data))
            manager = _offline_manager(files, names, manager, Path(folder))
        tasks, groups = {}, {}
        for name in names:
            loaded = _load(name, manager, files.get(name))
            tasks |= loaded["tasks"]
            groups |= loaded.get("groups", {})
        yield LoadedTasks(tasks, groups, {name: _data_record(task, files.get(name)) for name, task in tasks.items()})


def _task_manager(names: Sequence[str], include_path: str | None):
    """lm-eval's index of tasks that knows all names.  Raises InputError for a name that it does not know, with its nearest."""
    from lm_eval.tasks import TaskManager

    if include_path is not None and not os.path.isdir(include_path):
        raise InputError(f"--include_path={include_path} is no folder; give one that holds task files (.yaml) of lm-eval")
    own = [] if include_path is None else [include_path]
    known = TaskManager(include_path=own, include_defaults=False).task_index
    folders = _folders_of_tasks([name for name in names if name not in known])
    if folders is not None:
        return TaskManager(include_path=[*folders, *own], include_defaults=False)
    manager = _all_tasks(include_path)
    for name in names:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, 3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists all"
            raise InputError(f"--tasks: lm-eval has no task {name}; {hint}")
    return manager


@functools.cache
def _all_tasks(include_path: str | None):
    """lm-eval's index of everything that it has, and of a user's own tasks."""
    from lm_eval.tasks import TaskManager

    logger.info("reading the list of all of lm-eval's tasks")
    return TaskManager(include_path=include_path)


def _folders_of_tasks(names: Sequence[str]) -> list[Path] | None:
    """The folders of lm-eval's own files that define the names, if each is a plain task of exactly one file; else None."""
    found = [_folders_by_task().get(name, []) for name in names]
    return sorted({folder for (folder,) in found}) if all(len(places) == 1 for places in found) else None


@functools.cache
def _folders_by_task() -> dict[str, list[Path]]:
    """Where lm-eval's own files have a line `task: NAME`.

    It parses all of them, some 14,000, to know its tasks; to look for a line takes a small part of that time.
    """
    import lm_eval.tasks

    defines = re.compile(rb"^task:[ \t]*[\"']?([\w.-]+)[\"']?[ \t]*$", re.MULTILINE)
    folders: dict[str, list[Path]] = {}
    for path in Path(lm_eval.tasks.__file__).parent.rglob("*.yaml"):
        for name in defines.findall(path.read_bytes()):
            folders.setdefault(name.decode(), []).append(path.parent)
    return folders


def _leaf_names(names: Sequence[str], manager) -> list[str]:
    """The tasks behind names of tasks and tags.  Raises InputError for groups."""
    leaves: list[str] = []
    for name in names:
        entry = manager.task_index[name]
        kind = entry.kind.name
        if kind == "GROUP":
            raise InputError(f"--offline_data: {name} is a group, which sets the data of its tasks; name the tasks themselves")
        leaves += sorted(entry.tags) if kind == "TAG" else [name]
    return list(dict.fromkeys(leaves))


def _offline_files(names: Sequence[str], manager, folder: Path) -> dict[str, Path]:
    """The file of each task that does not read local files by itself.

    Raises InputError for a task whose data no file can replace, and for missing files.
    """
    if not folder.is_dir():
        raise InputError(f"--offline_data={folder} is no folder; give one with a file of JSON lines for each task")
    files = {}
    for name in names:
        entry = manager.task_index[name]
        config = entry.cfg or {}
        if entry.kind.name == "PY_TASK" or config.get("custom_dataset"):
            raise InputError(f"--offline_data: task {name} makes its data by Python code of its own, so no file can take its place")
        if config.get("dataset_path") in _LOCAL_FORMATS:
            logger.info("task %s reads files of its own: %s", name, config.get("dataset_kwargs"))
            continue
        files[name] = _file_of(name, folder, manager)
    return files


def _file_of(name: str, folder: Path, manager) -> Path:
    """`<task>.jsonl`, or the one `<task>_….jsonl` that is named after no other task."""
    exact = folder / f"{name}.jsonl"
    if exact.is_file():
        return exact
    others = [path for path in sorted(folder.glob(f"{name}_*.jsonl")) if path.stem not in manager.task_index]
    if len(others) == 1:
        return others[0]
    found = f"; {' and '.join(path.name for path in others)} are several" if others else ""
    raise InputError(f"--offline_data={folder} has no {name}.jsonl (nor one {name}_….jsonl) for task {name}{found}")


def _offline_manager(files: dict[str, Path], names: Sequence[str], manager, folder: Path):
    """An index of the same tasks that differ from lm-eval's in where their rows come from, and in nothing else.

    All rows are the split `test`; few-shot examples come from there too, as lm-eval leaves out the row that is asked about only where
    both are one split.
    """
    from lm_eval.tasks import TaskManager

    splits = {"training_split": None, "validation_split": None, "test_split": "test", "fewshot_split": "test"}
    for name in names:
        task: dict[str, Any] = {"include": str(manager.task_index[name].yaml_path), "task": name}
        if name in files:
            kwargs = {"data_files": {"test": str(files[name].resolve())}, "cache_dir": str(folder / "cache")}
            task |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": kwargs, **splits}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)


def _load(name: str, manager, file: Path | None) -> dict:
    try:
        return manager.load([name])
    except Exception as error:  # whatever the data set's library, its HTTP client or a template makes of missing rows and fields
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if file is not None:
            raise InputError(f"--offline_data: the rows of {file} do not fit task {name} ({reason})") from error
        raise InputError(
            f"the data of task {name} cannot be had ({reason}); without a network, --offline_data reads local files"
        ) from error


def _data_record(task, file: Path | None) -> dict:
    if file is None:
        config = task.config
        return {
            "dataset_path": config.dataset_path,
            "dataset_name": config.dataset_name,
            "split": config.test_split or config.validation_split,
        }
    return {"file": str(file), "sha256": sha256_file(file)}


def score_tasks(
    loaded: LoadedTasks,
    model: OpenModel,
    *,
    batch_size: int,
    limit: int | None,
    num_fewshot: int | None,
    bootstrap_iters: int,
    seed: int,
    device: torch.device | str,
) -> TaskResults:
    """Figures of a model on the tasks, then on the groups.

    limit: score the first so many rows of each task.  num_fewshot: worked examples before each question, unless the task forbids any;
    the same ones for every model, by the seed.
    Raises InputError for a model without tokenizer and for tasks that need images, code execution or sampling.
    """
    from lm_eval.evaluator import evaluate

    if model.tokenizer is None:
        raise InputError(f"{model.source.path} has no tokenizer with it, so tasks cannot be put to it")
    for task in loaded.tasks.values():
        _set_shots(task, num_fewshot)
        task.set_fewshot_seed(seed=seed)
        if getattr(task, "MULTIMODAL", False) or getattr(task, "UNSAFE_CODE", False):
            raise InputError(f"task {task.config.task} shows images or plays sounds, or runs code that a model writes; it is not supported")
    language_model = TaskModel(model, batch_size, device)
    with contextlib.redirect_stdout(sys.stderr):  # which lm-eval's bootstrap prints to
        results = evaluate(
            language_model,
            {"tasks": loaded.tasks, "groups": loaded.groups},
            limit=limit,
            bootstrap_iters=bootstrap_iters,
            log_samples=True,
        )
    scores = tuple(_task_score(name, results, loaded) for name in [*loaded.tasks, *loaded.groups])
    return TaskResults(scores, loaded.data, importlib.metadata.version("lm-eval"))


def _set_shots(task, num_fewshot: int | None) -> None:
    """As lm-eval's own command does: a task that says 0 keeps it."""
    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)


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
        stderr = stderr if isinstance(stderr, (int, float)) else None
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
