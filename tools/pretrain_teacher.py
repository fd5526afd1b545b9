"""Pretrain a GPT-NeoX teacher from scratch, through the same engine, loop and data as the two stages.

deepspeed tools/pretrain_teacher.py --model_config tools/configs/neox-small.json --data_path data/small --output_dir runs/teacher
"""

from megahedge.config.options import PretrainOptions
from megahedge.stages.pretrain import pretrain
from megahedge.utils.cli import parse_options, run_main

# A model of a few million parameters trained from scratch; the paper's rates are for distillation.
DEFAULTS = {"lr": 2e-3, "warmup_fraction": 0.02}


def main() -> None:
    """Entry point."""
    description = "Pretrain a GPT-NeoX model from scratch and write it as a Hugging Face folder."
    pretrain(parse_options(PretrainOptions, prog="pretrain_teacher.py", description=description, defaults=DEFAULTS))


if __name__ == "__main__":
    run_main(main)
