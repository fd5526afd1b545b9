"""Perplexity of a run, a Hugging Face folder or a hub model on indexed data, and its scores on tasks of lm-eval.

python scripts/evaluate.py --model runs/teacher --data_path data/small --context_probe --output teacher.json
python scripts/evaluate.py --model runs/stage2 --teacher EleutherAI/pythia-160m --tasks paper

Protocol: windows of --seq_len without overlap over the split as one stream, EOD kept, every token but the first scored once.  Word
perplexity and bits per byte divide the same loss by the words (divided by white space) and UTF-8 bytes of the scored tokens' text.
Tasks have lm-eval's prompts and metrics; `paper` names the ten of Attention to Mamba (arXiv 2604.14191).
"""

from megahedge.evaluation.evaluate import evaluate
from megahedge.evaluation.options import EvaluateOptions
from megahedge.utils.cli import parse_options, run_main
from megahedge.utils.files import disk_errors_explained, write_json
from megahedge.utils.versions import code_version, package_versions


def main() -> None:
    """Entry point."""
    options = parse_options(EvaluateOptions, prog="evaluate.py", description="Perplexity and task scores of a language model.")
    evaluation = evaluate(options)
    print(evaluation.table())
    if options.output is not None:
        with disk_errors_explained(options.output):
            write_json(options.output, evaluation.record() | {"code": code_version(), "packages": package_versions()})


if __name__ == "__main__":
    run_main(main)
