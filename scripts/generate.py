"""Go on from a prompt with a run, a Hugging Face folder or a hub model.

python scripts/generate.py --model runs/stage2-pythia-1b-paper --prompt "The harbour was"
"""

from megahedge.evaluation.generation import GenerateOptions, generate
from megahedge.utils.cli import parse_options, run_main


def main() -> None:
    """Entry point."""
    options = parse_options(GenerateOptions, prog="generate.py", description="Let a language model go on from a prompt.")
    print(options.prompt, end="", flush=True)
    for piece in generate(options):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    run_main(main)
