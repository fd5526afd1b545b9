"""Rows of the tables, tables and scales, as the files below scripts/configs describe them."""

import dataclasses
import os
from pathlib import Path

from megahedge.utils.errors import InputError
from megahedge.utils.files import read_yaml_object
from megahedge.utils.words import either


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A model of a table; paper/base.yaml says what the values mean."""

    name: str
    """Of its file."""
    model: str
    """What the table calls it."""
    teacher: str
    recipe: str
    budget: float
    stage1_share: float
    rate_factor: float
    separate_rate: bool
    ours: bool
    stage1: dict
    stage2: dict
    trained: bool = True
    """False for the teacher itself."""
    paper_perplexity: float | str | None = None
    """What the paper reports; None where it gives no number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Rows in the order of the paper, then ours."""

    name: str
    title: str
    rows: tuple[Row, ...]
    compare: tuple[tuple[str, str], ...] = ()
    """Names of rows whose difference is told."""
    curves: bool = False
    """Whether the perplexity is drawn over the tokens (the paper's figure 3)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Peak learning rates of a recipe."""

    stage1: float
    stage2: float
    lr_new: float
    """Of what stage 2 adds, in rows with a `separate_rate`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """Teachers, data and budget."""

    name: str
    tokens: int
    """Of both stages together, for a row with a budget of 1."""
    teachers: dict[str, str]
    """Folder or hub name by the name that rows use."""
    common: dict
    """Options of both stages."""
    rates: dict[str, Rates]
    """By recipe."""
    curve_points: int
    """Evaluations over the tokens of a row with a budget of 1."""
    cluster: bool = False
    """Whether its runs are for a cluster: their commands are written down instead of run."""

    def teacher(self, row: Row) -> str:
        """Raises InputError where the scale has none of that name."""
        if row.teacher not in self.teachers:
            known = either(self.teachers)
            raise InputError(f"row {row.name} needs the teacher {row.teacher}; the scale {self.name} has {known} (its file names them)")
        return self.teachers[row.teacher]


def table_names(configs: Path) -> list[str]:
    """Tables that there are."""
    return list(_read(configs / "tables.yaml"))


def read_table(configs: Path, name: str) -> Table:
    """The table of that name.  Raises InputError where there is none, or its files are damaged."""
    tables = _read(configs / "tables.yaml")
    if name not in tables:
        raise InputError(f"TABLE={name} is not known; use {either(tables)}")
    given = _checked(Table, tables[name] | {"name": name}, configs / "tables.yaml")
    rows = tuple(read_row(configs, row) for row in given["rows"])
    table = Table(**given | {"rows": rows, "compare": tuple(map(tuple, given.get("compare", [])))})
    strangers = {row for pair in table.compare for row in pair} - {row.name for row in rows}
    if strangers:
        raise InputError(f"{configs / 'tables.yaml'}: {name} compares {', '.join(sorted(strangers))}, which are none of its rows")
    return table


def read_row(configs: Path, name: str) -> Row:
    """The row paper/NAME.yaml over paper/base.yaml, whose stage1 and stage2 are merged option by option."""
    path = configs / "paper" / f"{name}.yaml"
    base, own = _read(configs / "paper" / "base.yaml"), _read(path)
    merged = base | own | {stage: base[stage] | own.get(stage, {}) for stage in ("stage1", "stage2")}
    row = Row(**_checked(Row, merged | {"name": name}, path))
    if not 0 <= row.stage1_share <= 1 or not 0 < row.budget <= 1:
        raise InputError(f"{path}: stage1_share={row.stage1_share} lies between 0 and 1, budget={row.budget} above 0 and up to 1")
    if not row.rate_factor > 0:
        raise InputError(f"{path}: rate_factor={row.rate_factor} must be above 0")
    return row


def read_scale(configs: Path, name: str) -> Scale:
    """The scale of that name.  Raises InputError where there is none, or its file is damaged."""
    path = configs / "scales" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(file.stem for file in path.parent.glob("*.yaml"))
        raise InputError(f"--scale={name} is not known; use {either(known)}")
    given = _checked(Scale, _read(path) | {"name": name}, path)
    return Scale(**given | {"rates": {recipe: Rates(**_checked(Rates, rates, path)) for recipe, rates in given["rates"].items()}})


def _read(path: Path) -> dict:
    return read_yaml_object(path, str(path))


def _checked(kind: type, values: dict, path: os.PathLike) -> dict:
    """`values`, which name all that `kind` must be given and nothing that it does not have."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = [name for name in values if name not in fields]
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in values]
    if unknown or missing:
        problems = [f"{', '.join(names)} {what}" for names, what in ((unknown, "is not known"), (missing, "is missing")) if names]
        raise InputError(f"{path}: {'; '.join(problems)}")
    return values
