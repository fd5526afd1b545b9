"""Rows of the tables, tables and scales, as the files below scripts/configs describe them."""

import dataclasses
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path

from megahedge.utils.errors import InputError
from megahedge.utils.files import read_yaml_object
from megahedge.utils.units import parse_count
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

    def rates_of(self, row: Row) -> Rates:
        """Raises InputError where the scale has none for the row's recipe."""
        if row.recipe not in self.rates:
            raise InputError(
                f"row {row.name} needs rates of the recipe {row.recipe}; the scale {self.name} has those of {either(self.rates)}"
            )
        return self.rates[row.recipe]


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
    shared = (stage for stage in ("stage1", "stage2") if isinstance(own.get(stage), dict))
    merged = base | own | {stage: base[stage] | own[stage] for stage in shared}
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
    given = _read(path) | {"name": name}
    given["tokens"], common = _count(given, "tokens", path), given.get("common", {})
    given = _checked(Scale, given, path)
    counts = {key: _count(common, key, path) for key in ("seq_len", "global_batch_size")}
    if given["curve_points"] < 1:
        raise InputError(f"{path}: curve_points={given['curve_points']} must be at least 1")
    rates = {recipe: Rates(**_checked(Rates, values, path)) for recipe, values in given["rates"].items()}
    return Scale(**given | {"common": common | counts, "rates": rates})


def _read(path: Path) -> dict:
    return read_yaml_object(path, str(path))


def _count(values: dict, name: str, path: os.PathLike) -> int:
    """A number of tokens or sequences, which may be written like 500K."""
    try:
        count = parse_count(values[name])
    except (InputError, KeyError, AttributeError) as error:
        found = f"{name} is missing" if isinstance(error, KeyError) else f"{name}={values[name]!r} is not a count"
        raise InputError(f"{path}: {found}; write it like 500K or 2000000") from None
    if count < 1:
        raise InputError(f"{path}: {name}={count} must be at least 1")
    return count


def _checked(kind: type, values: object, path: os.PathLike) -> dict:
    """`values`, which name all that `kind` must be given and nothing that it does not have, each of the type that it has there."""
    if not isinstance(values, Mapping):
        raise InputError(
            f"{path}: {values!r} stands where values by name ({', '.join(field.name for field in dataclasses.fields(kind))}) belong"
        )
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = [name for name in values if name not in fields]
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in values]
    if unknown or missing:
        problems = [f"{', '.join(names)} {what}" for names, what in ((unknown, "is not known"), (missing, "is missing")) if names]
        raise InputError(f"{path}: {'; '.join(problems)}")
    for name, value in values.items():
        wanted = _types(fields[name].type)
        if not any(_is_of(value, one) for one in wanted):
            raise InputError(f"{path}: {name}={value!r} is not {either(_WORDS[one] for one in wanted)}")
    return values


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "values by name",
    tuple: "a list",
    type(None): "null",
}


def _types(annotation) -> list[type]:
    """Those that a field may have, without what they hold."""
    kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return [typing.get_origin(kind) or kind for kind in kinds]


def _is_of(value: object, kind: type) -> bool:
    """As YAML reads it: a whole number is a number too, true is not, and a list stands for a tuple."""
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, {tuple: list}.get(kind, kind))
