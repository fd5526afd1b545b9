"""Turn a run into a folder that transformers loads without megahedge: `AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True)`.

python tools/convert_to_hf.py runs/stage2-pythia-1b-paper exported

Before OUT gets its name, what was written is loaded again and its logits are compared with the trainer's.
"""

from megahedge.export.to_hf import ExportOptions, export
from megahedge.utils.cli import parse_options, run_main


def main() -> None:
    """Entry point."""
    options = parse_options(ExportOptions, prog="convert_to_hf.py", description="Write a run's model as a Hugging Face folder.")
    print(export(options))


if __name__ == "__main__":
    run_main(main)
