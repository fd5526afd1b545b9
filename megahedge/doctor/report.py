"""What the doctor has found: sections of rows for people, figures for programs, and what to mend."""

import dataclasses
import textwrap
from collections.abc import Callable

from megahedge.utils.errors import InputError, RunError
from megahedge.utils.files import disk_errors_explained, write_json

_LABEL_WIDTH, _LINE_WIDTH = 18, 140
"""Of a section whose labels are short; of all lines."""


@dataclasses.dataclass
class Section:
    """One subject."""

    title: str
    rows: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Label and text, in the order in which they are printed."""
    figures: dict = dataclasses.field(default_factory=dict)
    """For programs, what the rows say in words."""
    problems: list[str] = dataclasses.field(default_factory=list)
    """What keeps a run from starting or from coming to its end, each with what to do."""
    warnings: list[str] = dataclasses.field(default_factory=list)
    """What a run can do with, each with what to do."""

    def row(self, label: str, text: object) -> None:
        """Add a row."""
        self.rows.append((label, str(text)))

    def attempt(self, label: str, action: Callable[[], object]):
        """What an action returns; where its input is at fault, a problem with a row that says so, and None."""
        try:
            return action()
        except (InputError, RunError) as error:
            self.row(label, "see the problems below")
            self.problems.append(str(error))
            return None


def examine(title: str, check: Callable[[Section], None]) -> Section:
    """The section that a check fills.  A check that fails, through whatever fault, costs its own section the rest of its rows alone."""
    section = Section(title)
    try:
        check(section)
    except (InputError, RunError) as error:
        section.problems.append(str(error))
    except Exception as error:
        reason = " ".join(str(error).split())
        section.problems.append(
            f"the section '{title}' could not be examined to its end ({type(error).__name__}: {reason}); please report it"
        )
    return section


def record(sections: list[Section]) -> dict:
    """All of it for JSON."""
    problems, warnings = (  # what two sections have met is told once
        list(dict.fromkeys(text for section in sections for text in getattr(section, kind))) for kind in ("problems", "warnings")
    )
    return {
        "sections": [
            {"title": section.title, "rows": [{"label": label, "text": text} for label, text in section.rows], "figures": section.figures}
            for section in sections
        ],
        "problems": problems,
        "warnings": warnings,
        "fit": not problems,
    }


def lines(found: dict) -> list[str]:
    """What is printed of a record: all of it but the figures."""
    printed = []
    for section in found["sections"]:
        width = max([_LABEL_WIDTH, *(len(row["label"]) for row in section["rows"])])
        printed += [section["title"], *(line for row in section["rows"] for line in _row(row["label"], row["text"], width)), ""]
    return [*printed, *_verdict(found)]


def publish(sections: list[Section], path: str | None) -> bool:
    """Print the report, write it to the file of --json where there is one, and say whether the machine is fit."""
    found = record(sections)
    print("\n".join(lines(found)), flush=True)
    if path is not None:
        with disk_errors_explained(path):
            write_json(path, found)
    return found["fit"]


def _row(label: str, text: str, width: int) -> list[str]:
    """The text beside its label; further lines of it below each other."""
    folded = textwrap.wrap(text, _LINE_WIDTH - width - 3, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"  {name:<{width}} {line}".rstrip() for name, line in zip([label, *[""] * (len(folded) - 1)], folded, strict=True)]


def _verdict(found: dict) -> list[str]:
    problems, warnings = found["problems"], found["warnings"]
    state = "fit for training" if found["fit"] else f"not fit for training: {_count(problems, 'problem')}"
    told = [*(f"problem: {text}" for text in problems), *(f"warning: {text}" for text in warnings)]
    indented = textwrap.TextWrapper(
        _LINE_WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return [f"{state}, {_count(warnings, 'warning')}" if warnings else state, *(line for text in told for line in indented.wrap(text))]


def _count(items: list, word: str) -> str:
    return f"{len(items)} {word}{'' if len(items) == 1 else 's'}"
