"""Train a byte-level BPE tokenizer, in the form of Pythia's, for a teacher that is trained from scratch.

python tools/train_tokenizer.py --input text.jsonl.gz --output_dir runs/tokenizer --vocab_size 2048
"""

from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from megahedge.data.find_sources import iterate_texts
from megahedge.utils.cli import parse_options, run_main
from megahedge.utils.errors import InputError
from megahedge.utils.files import atomic_write, check_output, disk_errors_explained, write_json
from megahedge.utils.logging import get_logger
from megahedge.utils.units import format_count

END_OF_TEXT = "<|endoftext|>"
_SMALLEST_VOCABULARY = 256 + 1  # every byte and the end of text
_LARGEST_VOCABULARY = 1_000_000  # four times the largest in use; the trainer reserves memory for all of it at its start

logger = get_logger(__name__)


@dataclass(frozen=True)
class TokenizerConfig:
    """Options of tools/train_tokenizer.py."""

    input: tuple[str, ...]
    """Text to learn from, as for preprocess_owt.py: .jsonl(.gz) files, globs, folders, a saved `datasets` folder, a hub name"""
    output_dir: str
    """Folder for tokenizer.json and tokenizer_config.json, readable by AutoTokenizer.from_pretrained"""
    vocab_size: int = 2048
    """Tokens, the 256 bytes and the end of text (id 0) included"""
    text_key: str = "text"
    """Key (column) of a record that holds the document's text"""
    overwrite: bool = False
    """Replace a tokenizer that is already in output_dir"""

    def __post_init__(self):
        if not _SMALLEST_VOCABULARY <= self.vocab_size <= _LARGEST_VOCABULARY:
            limits = f"{_SMALLEST_VOCABULARY} (256 bytes and {END_OF_TEXT}) and {_LARGEST_VOCABULARY}"
            raise InputError(f"--vocab_size={self.vocab_size} must lie between {limits}")


def train_tokenizer(config: TokenizerConfig) -> tokenizers.Tokenizer:
    """Learn the merges and write the folder; the same input gives the same files.

    Raises InputError for bad input, an existing tokenizer, or input without a document, and RunError for a full disk.
    """
    path = Path(config.output_dir) / "tokenizer.json"
    check_output("output_dir", config.output_dir, path, _options_path(path), overwrite=config.overwrite)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    # no Unicode normalisation, unlike Pythia's NFC: decoding gives back the text byte for byte
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[END_OF_TEXT],  # the first special token has id 0
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    counted = _CountedTexts(config)
    tokenizer.train_from_iterator(counted, trainer)
    if counted.documents == 0:
        raise InputError(f"no document in --input {' '.join(config.input)}")
    with disk_errors_explained(config.output_dir):
        _save(tokenizer, path)
    if tokenizer.get_vocab_size() < config.vocab_size:
        logger.warning("the text yields only %d of %d tokens", tokenizer.get_vocab_size(), config.vocab_size)
    documents, size = counted.documents, format_count(counted.characters)
    logger.info("wrote %s: %d tokens from %d documents, %s characters", path, tokenizer.get_vocab_size(), documents, size)
    return tokenizer


class _CountedTexts:
    """The documents, counted as they pass."""

    def __init__(self, config: TokenizerConfig):
        self._config = config
        self.documents = self.characters = 0

    def __iter__(self):
        for text in iterate_texts(self._config.input, self._config.text_key):
            self.documents += 1
            self.characters += len(text)
            yield text


def _options_path(path: Path) -> Path:
    return path.with_name("tokenizer_config.json")


def _save(tokenizer: tokenizers.Tokenizer, path: Path) -> None:
    """Write what AutoTokenizer of transformers 4 and 5 reads; the class name is the one that both know."""
    write_json(
        _options_path(path),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "unk_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        },
    )
    with atomic_write(path, "w") as handle:
        handle.write(tokenizer.to_str(pretty=True))


def main() -> None:
    """Entry point."""
    train_tokenizer(parse_options(TokenizerConfig, prog="train_tokenizer.py", description="Train a byte-level BPE tokenizer."))


if __name__ == "__main__":
    run_main(main)
