"""Show the JSON files of scripts/evaluate.py beside each other; the first, say the teacher's, is the measure of the others.

python scripts/compare_results.py --results results/teacher.json results/stage1.json results/stage2.json
"""

import dataclasses
import math
from pathlib import Path

from megahedge.utils.cli import parse_options, run_main
from megahedge.utils.errors import InputError
from megahedge.utils.files import read_json_object


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareResultsOptions:
    """scripts/compare_results.py"""

    results: tuple[str, ...]
    """Files that scripts/evaluate.py --output wrote, in the order of the rows."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What one file says."""

    label: str
    scored: tuple
    """What was scored and how: figures compare only where it is the same."""
    dtype: str
    loss: float
    token_perplexity: float | None
    """None where it was too large for a number, as of a model that has diverged."""
    bits_per_byte: float | None
    """None where no tokenizer was at hand."""


def read_row(path: Path) -> Row:
    """Raises InputError for a file that is not a result of evaluate.py, or holds no perplexity."""
    record = read_json_object(path)
    try:
        figures, data, options = record["figures"], record["data"], record["options"]
        windows = options["seq_len"], options.get("reset_at_documents", False)
        scored = data["idx_sha256"], data["bin_blocks_sha256"], *windows, figures["tokens"]
        row = Row(path.stem, scored, options["dtype"], figures["loss"], figures["token_perplexity"], figures["bits_per_byte"])
    except (KeyError, TypeError):
        row = None
    if row is None or not (_is_figure(row.loss) and all(figure is None or _is_figure(figure) for figure in _may_lack(row))):
        raise InputError(f"--results: {path} holds no perplexity as scripts/evaluate.py --output writes it")
    return row


def _may_lack(row: Row) -> tuple[float | None, ...]:
    return row.token_perplexity, row.bits_per_byte


def _is_figure(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def table(rows: list[Row]) -> str:
    """For people.  Raises InputError where the rows were scored on different text or in windows of different lengths."""
    first = rows[0]
    for row in rows:
        if row.scored != first.scored:
            raise InputError(f"--results: {row.label} was scored on other data or windows than {first.label}; score both alike")
    width = max(len("model"), *(len(row.label) for row in rows))
    lines = [f"{'model':<{width}} {'loss':>8} {'perplexity':>11} {'bits/byte':>10} {'× ' + first.label:>10}"]
    for row in rows:
        known = row.token_perplexity is not None and first.token_perplexity is not None
        ratio = row.token_perplexity / first.token_perplexity if known else None
        shown = _show(row.token_perplexity, 3), _show(row.bits_per_byte, 4), _show(ratio, 3)
        lines.append("{:<{}} {:8.4f} {:>11} {:>10} {:>10}".format(row.label, width, row.loss, *shown))
    others = [f"{row.label} was scored in {row.dtype}, {first.label} in {first.dtype}" for row in rows if row.dtype != first.dtype]
    return "\n".join([*lines, *(f"{other}: a part of their difference is rounding" for other in others)])


def _show(figure: float | None, decimals: int) -> str:
    return "-" if figure is None else f"{figure:.{decimals}f}"


def main() -> None:
    """Entry point."""
    options = parse_options(CompareResultsOptions, prog="compare_results.py", description="Show results of evaluate.py in one table.")
    print(table([read_row(Path(name)) for name in options.results]))


if __name__ == "__main__":
    run_main(main)
