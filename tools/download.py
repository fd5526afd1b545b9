"""Fetch teachers, text and tasks from the Hugging Face hub beforehand, for nodes without a network.

python tools/download.py --teacher EleutherAI/pythia-1b --text Skylion007/openwebtext --text_dir data/openwebtext-raw --tasks paper
"""

from megahedge.evaluation.download import DownloadOptions, download
from megahedge.utils.cli import parse_options, run_main


def main() -> None:
    """Entry point."""
    download(parse_options(DownloadOptions, prog="download.py", description="Fetch models, text and tasks from the Hugging Face hub."))


if __name__ == "__main__":
    run_main(main)
