"""Tasks of lm-eval by name, with their rows: from lm-eval's own data sets, or from local files with nothing else changed."""

import contextlib
import dataclasses
import difflib
import functools
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import lm_eval.tasks
import yaml
from lm_eval.tasks import TaskManager

from megahedge.evaluation.lm_eval.paper_rows import ROW_CHECKS
from megahedge.evaluation.lm_eval.rows import LocalRows, check_docs, check_file
from megahedge.utils.errors import InputError
from megahedge.utils.files import sha256_file
from megahedge.utils.logging import get_logger

logger = get_logger(__name__)
logging.getLogger("lm_eval.api.task").setLevel(logging.ERROR)  # its warnings are for authors of task files

_LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).parent
_LOCAL_FORMATS = ("json", "csv", "parquet", "text")


@dataclasses.dataclass(frozen=True)
class LoadedTasks:
    """Tasks of lm-eval with their rows."""

    tasks: dict[str, Any]
    """By name."""
    groups: dict[str, Any]
    data: dict[str, dict]
    """By task: where its rows come from."""
    local: dict[str, LocalRows]
    """By task: the lines that its rows come from, where they come from a file of --offline_data."""

    def place(self, task: str, row: int) -> str:
        """Where a row of a task, counted from 0, comes from, for people."""
        local = self.local.get(task)
        if local is None or len(local.lines) != len(self.tasks[task].eval_docs):  # a task may leave rows out, or divide them
            return f"row {row + 1} of task {task}"
        return local.place(row)


@dataclasses.dataclass(frozen=True)
class FoundTasks:
    """Tasks, groups or tags that lm-eval knows, whose rows are still to be read."""

    names: Sequence[str]
    manager: TaskManager
    files: dict[str, Path] | None
    """By task: the local file that its rows come from; None where they come from lm-eval's own data sets."""

    @contextlib.contextmanager
    def load(self, num_fewshot: int | None = None) -> Iterator[LoadedTasks]:
        """Read the rows; within `with`, as those of local files are mapped from a temporary folder.

        num_fewshot: worked examples before each question, unless the task forbids any; None for what the task says.
        Raises InputError for rows that cannot be had, for rows of local files that the tasks cannot be made of, for fewer rows than
        worked examples, and for tasks that need images, sounds or code execution.
        """
        files, manager = self.files or {}, self.manager
        local = {name: check_file(file, name, self._is_of_paper(name)) for name, file in files.items()}
        with contextlib.ExitStack() as stack:
            if self.files is not None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="megahedge-tasks-"))
                stack.enter_context(_no_downloads())
                manager = _offline_manager(files, self.names, manager, Path(folder))
            tasks, groups = {}, {}
            for name in self.names:
                loaded = _load(name, manager, files.get(name))
                tasks |= loaded["tasks"]
                groups |= loaded.get("groups", {})
            data = {name: _data_record(task, files.get(name)) for name, task in tasks.items()}
            loaded = LoadedTasks(tasks, groups, data, local)
            for name, task in tasks.items():
                _check_supported(name, task)
                _set_shots(name, task, num_fewshot)
                if task.config.dataset_path in _LOCAL_FORMATS and not self._is_of_paper(name):
                    check_docs(task, functools.partial(loaded.place, name))
            yield loaded

    def _is_of_paper(self, name: str) -> bool:
        """Whether it is one of the paper's tasks as lm-eval defines them, and no task of a user's own under its name."""
        return name in ROW_CHECKS and Path(self.manager.task_index[name].yaml_path).is_relative_to(_LM_EVAL_TASKS)


def find_tasks(names: Sequence[str], include_path: str | None = None, offline_data: str | None = None) -> FoundTasks:
    """Look tasks, groups or tags up, without reading or downloading rows.

    include_path: folder of a user's own task files, which win over lm-eval's of the same name.
    offline_data: folder of JSON lines that take the place of each task's data set; nothing is downloaded then.
    Raises InputError for unknown names, and for local files that are missing or cannot stand for a task's data.
    """
    manager = _task_manager(names, include_path)
    if offline_data is None:
        return FoundTasks(names, manager, None)
    names = _leaf_names(names, manager)
    return FoundTasks(names, manager, _offline_files(names, manager, Path(offline_data)))


def _task_manager(names: Sequence[str], include_path: str | None):
    """lm-eval's index of tasks that knows all names.  Raises InputError for a name that it does not know, with its nearest."""
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
    defines = re.compile(rb"^task:[ \t]*[\"']?([\w.-]+)[\"']?[ \t]*$", re.MULTILINE)
    folders: dict[str, list[Path]] = {}
    for path in _LM_EVAL_TASKS.rglob("*.yaml"):
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
        while error.__cause__ is not None:  # the data set's library says that something has failed, and its cause what
            error = error.__cause__
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if file is not None:
            raise InputError(f"--offline_data: the rows of {file} do not fit task {name} ({reason})") from error
        raise InputError(
            f"the data of task {name} cannot be had ({reason}); without a network, --offline_data reads local files"
        ) from error


def _set_shots(name: str, task, num_fewshot: int | None) -> None:
    """As lm-eval's own command does: a task that says 0 keeps it.  Raises InputError where it has fewer rows than worked examples."""
    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    shots = task.get_config("num_fewshot")
    if shots == 0:
        return
    rows = len(task.sampler.fewshot_indices or task.sampler.df)
    if task.fewshot_cfg.split == task.config.test_split:  # which then leaves out the row that is asked about
        rows -= 1
    if shots > rows:
        raise InputError(f"--num_fewshot={shots}: task {name} has {rows} rows for worked examples, without the one that is asked about")


def _check_supported(name: str, task) -> None:
    if getattr(task, "MULTIMODAL", False) or getattr(task, "UNSAFE_CODE", False):
        raise InputError(f"task {name} shows images or plays sounds, or runs code that a model writes; it is not supported")


def _data_record(task, file: Path | None) -> dict:
    if file is None:
        config = task.config
        return {
            "dataset_path": config.dataset_path,
            "dataset_name": config.dataset_name,
            "split": config.test_split or config.validation_split,
        }
    return {"file": str(file), "sha256": sha256_file(file)}


@contextlib.contextmanager
def _no_downloads() -> Iterator[None]:
    """Keep the Hugging Face libraries from the network.

    They read HF_HUB_OFFLINE and HF_DATASETS_OFFLINE once, when they are imported, and by now they are: hence their constants.
    """
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
