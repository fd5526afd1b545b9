"""Rows of local files, told by file and line where they are not what their task needs, before anything is scored.

lm-eval would put a missing field to the model as "None", count a wrong label as a wrong answer, or fail at the last step.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jinja2 import nodes
from lm_eval.utils import env

from megahedge.evaluation.lm_eval.paper_rows import ROW_CHECKS, RowError
from megahedge.utils.errors import InputError


@dataclasses.dataclass(frozen=True)
class LocalRows:
    """Where the rows of a file of JSON lines stand."""

    task: str
    file: Path
    lines: tuple[int, ...]
    """Line of each row, from 1."""

    def place(self, row: int) -> str:
        """File and line of a row, counted from 0, for people."""
        return _place(self.file, self.lines[row], self.task)


def check_file(file: Path, task: str, of_paper: bool) -> LocalRows:
    """Read the rows of a task.  Raises InputError for a line that is no JSON object, or that a task `of_paper` cannot be made of."""
    check = ROW_CHECKS[task] if of_paper else None
    lines = []
    for number, line in _lines(file):
        try:
            row = _parse(line)
            if check is not None:
                check(row)
        except RowError as fault:
            raise InputError(f"--offline_data: {_place(file, number, task)} cannot be used: {fault}") from None
        lines.append(number)
    if not lines:
        raise InputError(f"--offline_data: {file} holds no rows; task {task} reads a JSON object from each line")
    return LocalRows(task, file, tuple(lines))


def _place(file: Path, line: int, task: str) -> str:
    return f"{file}:{line} (task {task})"


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers."""
    try:
        with open(file, "rb") as handle:
            yield from ((number, line) for number, line in enumerate(handle, 1) if line.strip())
    except OSError as error:
        raise InputError(f"--offline_data: {file} cannot be read: {error.strerror}") from None


def _parse(line: bytes) -> dict:
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RowError(f"it is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise RowError(f"a JSON object is wanted, not a {type(row).__name__}")
    for name, value in row.items():
        try:
            f"{name}{json.dumps(value, ensure_ascii=False)}".encode()
        except UnicodeEncodeError:
            raise RowError(f"{name!r} holds half a character (a lone surrogate)") from None
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def check_docs(task: Any, place: Callable[[int], str]) -> None:
    """Raise InputError for the first row that a task of lm-eval cannot ask, or has no right answer to; `place` names the row."""
    fields = _printed_fields(task)
    for number, doc in enumerate(task.eval_docs):
        try:
            fault = _fault(task, doc, fields)
        except Exception as error:  # whatever the code in a task file makes of a row that it was not written for
            fault = f"{type(error).__name__}: {error}"
        if fault:
            raise InputError(f"{place(number)} cannot be used: {' '.join(fault.split())[:300]}")


def _printed_fields(task: Any) -> list[str]:
    """Fields that the task's templates print as they are, so that a null would be printed, too."""
    config = task.config
    templates = [template for template in (config.doc_to_text, config.doc_to_target, config.doc_to_choice) if isinstance(template, str)]
    fields = {template for template in templates if template in task.features}
    for template in templates:
        for output in env.parse(template).body:
            if isinstance(output, nodes.Output) and not any(output.find_all((nodes.CondExpr, nodes.Filter))):
                fields |= {variable.name for variable in output.find_all(nodes.Name)}
    return sorted(fields & set(task.features))


def _fault(task: Any, doc: dict, fields: list[str]) -> str | None:
    """What is wrong with a row, as far as it can be told without a model."""
    absent = [field for field in fields if doc[field] is None]
    if absent:
        return f"{absent[0]} is missing or null"
    text, target = task.doc_to_text(doc), task.doc_to_target(doc)
    if task.OUTPUT_TYPE in ("loglikelihood", "loglikelihood_rolling"):
        return None if target else "it has no text to score"
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    choices = task.doc_to_choice(doc)
    if not choices or not all(isinstance(choice, str) for choice in choices):
        return f"its choices are {choices!r}; a list of texts is wanted"
    right = text if task.multiple_input else target
    if right == [] or not all(_is_choice(answer, choices) for answer in (right if isinstance(right, list) else [right])):
        return f"its right answer is {right!r}, which is none of its {len(choices)} choices"
    return None


def _is_choice(answer: object, choices: list[str]) -> bool:
    """Whether it is a choice, or the number of one."""
    return 0 <= answer < len(choices) if isinstance(answer, int) else answer in choices
