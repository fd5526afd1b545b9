"""Merge datasets into one, document after document, without going back to their text.

python tools/merge_datasets.py --input data/part1 data/part2 --output_prefix data/all
"""

from megahedge.data.merge import MergeConfig, merge_datasets
from megahedge.utils.cli import parse_options, run_main


def main() -> None:
    """Entry point."""
    merge_datasets(parse_options(MergeConfig, prog="merge_datasets.py", description="Merge indexed datasets into one."))


if __name__ == "__main__":
    run_main(main)
