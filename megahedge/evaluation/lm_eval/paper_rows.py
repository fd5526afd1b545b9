"""What lm-eval's ten tasks of the paper read from a row, field by field."""

import ast
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class RowError(ValueError):
    """A row that a task cannot be made of; the message names the field, and what would do."""


def _require(row: dict, name: str, wanted: str, fits: Callable[[Any], bool]) -> Any:
    """The value of a field (`a.b`: of b in a).  Raises RowError unless it fits."""
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise RowError(f"{name} is missing; {wanted} is wanted")
        value = value[part]
    if not fits(value):
        raise RowError(f"{name} is {_shortened(value)}; {wanted} is wanted")
    return value


def _shortened(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"


def _is_filled(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _texts(row: dict, *names: str) -> None:
    for name in names:
        _require(row, name, "text that is not empty", _is_filled)


def _choices(row: dict, name: str) -> list[str]:
    return _require(
        row, name, "a list of two texts or more", lambda value: isinstance(value, list) and len(value) > 1 and all(map(_is_filled, value))
    )


def _one_of(row: dict, name: str, allowed: Sequence) -> None:
    """Of the same kind, too: JSON's true is no 1, as "1" is none."""
    wanted = f"one of {', '.join(map(repr, allowed))}"
    _require(row, name, wanted, lambda value: any(type(value) is type(known) and value == known for known in allowed))


def _numbers(numbers: Iterable[int]) -> list[int | str]:
    """As numbers or as text: the tasks that convert them take either."""
    return [form(number) for number in numbers for form in (int, str)]


def _arc(row: dict) -> None:
    _texts(row, "question")
    texts = _choices(row, "choices.text")
    labels = _require(
        row, "choices.label", f"a list of {len(texts)} names", lambda value: isinstance(value, list) and len(value) == len(texts)
    )
    _one_of(row, "answerKey", labels)


def _social_iqa(row: dict) -> None:
    _texts(row, "context", "question", "answerA", "answerB", "answerC")
    _one_of(row, "label", _numbers((1, 2, 3)))


def _piqa(row: dict) -> None:
    _texts(row, "goal", "sol1", "sol2")
    _one_of(row, "label", (0, 1))


def _hellaswag(row: dict) -> None:
    for name in ("activity_label", "ctx_a", "ctx_b"):  # of which the last, if no other, is empty in many rows
        _require(row, name, "text", lambda value: isinstance(value, str))
    _one_of(row, "label", _numbers(range(len(_choices(row, "endings")))))


def _lambada(row: dict) -> None:
    wanted = "text that ends in a blank and a last word"
    _require(row, "text", wanted, lambda value: isinstance(value, str) and " " in value and bool(value.split(" ")[-1].strip()))


def _boolq(row: dict) -> None:
    _texts(row, "passage", "question")
    _one_of(row, "label", (0, 1))


def _race(row: dict) -> None:
    _texts(row, "article")
    _require(row, "problems", "a list of problems, written as text", lambda value: bool(_problems(value)))
    for problem in _problems(row["problems"]):
        try:
            _texts(problem, "question")
            _require(problem, "options", "a list of four texts", _is_four_texts)
            _one_of(problem, "answer", "ABCD")
        except RowError as fault:
            raise RowError(f"in problems, {fault}") from None


def _is_four_texts(value: Any) -> bool:
    """Some of RACE's own are empty."""
    return isinstance(value, list) and len(value) == 4 and all(isinstance(text, str) for text in value)


def _problems(text: Any) -> list[dict] | None:
    """RACE's questions to an article, which are a list in Python's notation; None where they are not."""
    try:
        problems = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return problems if isinstance(problems, list) and all(isinstance(problem, dict) for problem in problems) else None


def _logiqa(row: dict) -> None:
    _texts(row, "context", "question")
    _one_of(row, "label", "abcd"[: len(_choices(row, "options"))])


def _winogrande(row: dict) -> None:
    _require(row, "sentence", "text with _ where the option goes", lambda value: isinstance(value, str) and "_" in value)
    _texts(row, "option1", "option2")
    _one_of(row, "answer", ("1", "2"))


ROW_CHECKS: dict[str, Callable[[dict], None]] = {
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "social_iqa": _social_iqa,
    "piqa": _piqa,
    "hellaswag": _hellaswag,
    "lambada_openai": _lambada,
    "boolq": _boolq,
    "race": _race,
    "logiqa": _logiqa,
    "winogrande": _winogrande,
}
"""By task: raises RowError for a row that lacks something."""
