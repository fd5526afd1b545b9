"""Show the JSON files of scripts/evaluate.py beside each other; the first, say the teacher's, is the measure of the others.

python scripts/compare_results.py --results results/teacher.json results/stage1.json results/stage2.json
"""

import dataclasses
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
    loss: float
    token_perplexity: float
    bits_per_byte: float | None


def read_row(path: Path) -> Row:
    """Raises InputError for a file that is not a result of evaluate.py, or holds no perplexity."""
    record = read_json_object(path)
    try:
        figures, data, options = record["figures"], record["data"], record["options"]
        scored = data["idx_sha256"], data["bin_blocks_sha256"], options["seq_len"], figures["tokens"]
        return Row(path.stem, scored, figures["loss"], figures["token_perplexity"], figures["bits_per_byte"])
    except (KeyError, TypeError):
        raise InputError(f"--results: {path} holds no perplexity as scripts/evaluate.py --output writes it") from None


def table(rows: list[Row]) -> str:
    """For people.  Raises InputError where the rows were scored on different text or in windows of different lengths."""
    first = rows[0]
    for row in rows:
        if row.scored != first.scored:
            raise InputError(f"--results: {row.label} was scored on other data or windows than {first.label}; score both alike")
    width = max(len(row.label) for row in rows)
    lines = [f"{'model':<{width}} {'loss':>8} {'perplexity':>11} {'bits/byte':>10} {'× ' + first.label:>10}"]
    for row in rows:
        bits = "-" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}"
        ratio = row.token_perplexity / first.token_perplexity
        lines.append(f"{row.label:<{width}} {row.loss:8.4f} {row.token_perplexity:11.3f} {bits:>10} {ratio:10.3f}")
    return "\n".join(lines)


def main() -> None:
    """Entry point."""
    options = parse_options(CompareResultsOptions, prog="compare_results.py", description="Show results of evaluate.py in one table.")
    print(table([read_row(Path(name)) for name in options.results]))


if __name__ == "__main__":
    run_main(main)
