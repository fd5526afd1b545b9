"""Go on from a prompt with a run, an exported model, a Hugging Face folder or a hub model.

python scripts/generate.py --model runs/stage2-pythia-1b-paper --prompt "The harbour was" --compare_teacher

Without --prompt it reads prompts from the terminal, a line each, until the end of the input (Ctrl-D).
"""

import sys
from collections.abc import Iterator

from megahedge.evaluation.generation import GenerateOptions, Writer, writers
from megahedge.utils.cli import parse_options, run_main
from megahedge.utils.errors import InputError


def main() -> None:
    """Entry point."""
    options = parse_options(GenerateOptions, prog="generate.py", description="Let a language model go on from a prompt.")
    models = list(writers(options))
    if options.prompt is not None:
        answer(options.prompt, models)
        return
    for prompt in read_prompts():
        try:
            answer(prompt, models)
        except InputError as error:  # the next prompt may do
            print(f"error: {error}", file=sys.stderr)


def answer(prompt: str, models: list[Writer]) -> None:
    """Print the prompt and what each model adds to it, as it comes."""
    for model in models:
        if len(models) > 1:
            print(f"--- {model.name}")
        model.write(prompt, Printer(prompt))
        print()


class Printer:
    """Prints pieces as they come, after the prompt; not before the first, so that what is logged until then does not part them."""

    def __init__(self, prompt: str):
        self.before = prompt

    def __call__(self, piece: str) -> None:
        print(self.before + piece, end="", flush=True)
        self.before = ""


def read_prompts() -> Iterator[str]:
    """Lines that are not empty; a terminal is asked for each.  Bytes that are no text become lone surrogates, which a Writer refuses."""
    sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        if sys.stdin.isatty():
            print("prompt> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


if __name__ == "__main__":
    run_main(main)
