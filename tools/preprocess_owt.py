"""Tokenise text into Megatron's indexed format: a training and a validation pair and a meta.json.

python tools/preprocess_owt.py --input text.jsonl.gz --output_prefix data/openwebtext --tokenizer EleutherAI/pythia-1b
"""

from megahedge.data.preprocess import PreprocessConfig, preprocess
from megahedge.utils.cli import parse_options, run_main


def main() -> None:
    """Entry point."""
    preprocess(parse_options(PreprocessConfig, prog="preprocess_owt.py", description="Tokenise text into indexed training data."))


if __name__ == "__main__":
    run_main(main)
