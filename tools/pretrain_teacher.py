"""Pretrain a GPT-NeoX teacher, from scratch or on from given weights, through the same engine, loop and data as the two stages.

deepspeed tools/pretrain_teacher.py --model_config tools/configs/neox-small.json --data_path data/small --output_dir runs/teacher
"""

from megahedge.config.options import PretrainOptions
from megahedge.utils.cli import parse_options, run_main


def main() -> None:
    """Entry point."""
    description = "Pretrain a GPT-NeoX model, from scratch or on from given weights, and write it as a Hugging Face folder."
    options = parse_options(PretrainOptions, prog="pretrain_teacher.py", description=description)
    from megahedge.stages.pretrain import pretrain  # after the options: it takes seconds, and --help needs none of it

    pretrain(options)


if __name__ == "__main__":
    run_main(main)
