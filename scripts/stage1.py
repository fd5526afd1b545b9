"""Stage 1 of the recipe: learn feature maps with which linear attention mimics the teacher.

deepspeed scripts/stage1.py --ds_config ds_configs/zero2.json --teacher EleutherAI/pythia-1b --data_path data/openwebtext
"""

from megahedge.config.options import Stage1Options
from megahedge.utils.cli import parse_options, run_main


def main() -> None:
    """Entry point."""
    options = parse_options(Stage1Options, prog="stage1.py", description="Stage 1: learn Hedgehog feature maps from a softmax teacher.")
    from megahedge.stages.stage1 import stage1  # after the options: it takes seconds, and --help needs none of it

    stage1(options)


if __name__ == "__main__":
    run_main(main)
