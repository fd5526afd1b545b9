"""Stage 2: turn each mixer into a HedgeMamba and fine-tune everything but the embeddings.

deepspeed scripts/stage2.py --ds_config ds_configs/zero2.json --init_from runs/stage1-pythia-1b-paper
"""

from megahedge.config.options import Stage2Options
from megahedge.utils.cli import parse_options, run_main


def main() -> None:
    """Entry point."""
    options = parse_options(Stage2Options, prog="stage2.py", description="Turn each mixer into a HedgeMamba and fine-tune on text.")
    from megahedge.stages.stage2 import stage2  # after the options: it takes seconds, and --help needs none of it

    stage2(options)


if __name__ == "__main__":
    run_main(main)
