"""Finding the tokenizer of a model."""

import os
from collections.abc import Sequence
from pathlib import Path

from megahedge.utils.errors import InputError
from megahedge.utils.files import read_json_object, run_hint

_VOCABULARY_FILES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "config.json")


def load_tokenizer(name: str, revision: str | None = None, *, option: str | None = None):
    """A fast Hugging Face tokenizer from a folder or the hub.

    option: the command-line option that gave `name`, for error messages.
    Raises InputError where there is none, or where its files are damaged.
    """
    import transformers

    given = f"--{option}={name}" if option else f"the tokenizer {name}"
    if os.path.isdir(name):
        _check_folder(Path(name), given)
    elif name.endswith(".model") and os.path.isfile(name):
        raise InputError(
            f"{given} is a SentencePiece model, which serves preprocessing alone; give a Hugging Face folder of that tokenizer"
        )
    elif not name.strip() or os.path.exists(name):
        raise InputError(f"{given} is no folder; give a folder with tokenizer.json, or the name of a model on the Hugging Face hub")
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it warns of model types that it does not know, a student's among them
    try:
        # False, and not None, at which transformers asks on the terminal whether to run code that lies with the model
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # damaged files fail in whatever way their contents lead to, and the hub's client has errors of its own
        if not os.path.isdir(name):
            raise InputError(f"{given} is no folder here, and the Hugging Face hub gave no tokenizer of that name") from None
        reason = " ".join(str(error).split())
        raise InputError(f"{given} holds a tokenizer that cannot be read ({type(error).__name__}: {reason})") from None
    finally:
        transformers.logging.set_verbosity(verbosity)
    if not tokenizer.is_fast:
        raise InputError(f"{given} has no fast version (tokenizer.json), which preprocessing needs")
    return tokenizer


def _check_folder(folder: Path, given: str) -> None:
    """Raise InputError for a folder without a vocabulary, for which transformers makes one up, and for damaged JSON files."""
    if not any(path.is_file() for pattern in _VOCABULARY_FILES for path in folder.glob(pattern)):
        raise InputError(f"{given} holds no tokenizer; {run_hint(folder) or 'give a folder with tokenizer.json'}")
    for path in (folder / name for name in _JSON_FILES):
        if path.is_file():
            read_json_object(path)


class SentencePieceTokenizer:
    """A SentencePiece model file, with as much of a Hugging Face tokenizer's interface as preprocessing asks for.

    Raises InputError where the package is missing or the file is no such model.
    """

    def __init__(self, path: str, option: str = "sentencepiece"):
        try:
            import sentencepiece
        except ImportError as error:
            raise InputError(f"--{option}={path} needs the package sentencepiece ({error}); pip install megahedge[sentencepiece]") from None
        try:
            self.model = Path(path).read_bytes()
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self.model)
        except OSError as error:
            raise InputError(f"--{option}={path} cannot be read: {error.strerror}") from None
        except Exception as error:  # what the library makes of other files
            raise InputError(f"--{option}={path} is no SentencePiece model ({' '.join(str(error).split())})") from None
        if self._processor.get_piece_size() == 0:  # an empty file
            raise InputError(f"--{option}={path} is no SentencePiece model (it has no pieces)")
        end = self._processor.eos_id()
        self.eos_token_id = end if end >= 0 else None

    def get_vocab(self) -> dict[str, int]:
        """Ids by piece."""
        return {self._processor.id_to_piece(index): index for index in range(self._processor.get_piece_size())}

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        """Ids of a text, without those that mark its ends."""
        assert not add_special_tokens
        return {"input_ids": self.encode_batch([text])[0]}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return self._processor.encode(list(texts), out_type=int, num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        return self._processor.decode([int(index) for index in ids])
