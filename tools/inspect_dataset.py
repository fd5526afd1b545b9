"""Say what an indexed dataset holds, check it, print one of its documents, compare it with another.

python tools/inspect_dataset.py data/openwebtext --check
python tools/inspect_dataset.py data/openwebtext_val --document 17
"""

from megahedge.data.inspect import InspectConfig, inspect_dataset
from megahedge.utils.cli import parse_options, run_main


def main() -> int:
    """Entry point; status 1 where a check or a comparison has found something."""
    options = parse_options(InspectConfig, prog="inspect_dataset.py", description="Say what an indexed dataset holds.")
    lines, sound = inspect_dataset(options)
    print("\n".join(lines))
    return 0 if sound else 1


if __name__ == "__main__":
    run_main(main)
