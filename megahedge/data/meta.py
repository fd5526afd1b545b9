"""What is known about a dataset beside its tokens: `<prefix>.meta.json`, and which of its two pairs serves which purpose."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megahedge.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megahedge.utils.errors import InputError
from megahedge.utils.files import read_json, sha256_file, write_json
from megahedge.utils.logging import get_logger

FORMAT_VERSION = 1
SPLITS = ("train", "val")
_NUM_BLOCKS, _BLOCK_BYTES = 64, 1 << 16
# cases in which tokenizers with equal vocabularies differ: merges, white space, case, digits, accents, scripts, specials
_PROBE = """The quick brown fox, 3.14159 and 1,000,000 lazy dogs don't "jump" (really).
    def scan(C, B, V):\treturn  C @ B.T   # tabs,  runs of   blanks
Ünïcödé naïve café e\u0301 — “quotes”… 汉字 かな Привет العربية 🙂👩‍🔬
ALL CAPS CamelCase snake_case https://example.org/a?b=c&d=%20 <|endoftext|> </s> [MASK]\r\n\r\n   trailing  """

logger = get_logger(__name__)


@dataclass(frozen=True)
class SplitMeta:
    """Counts of one pair."""

    documents: int
    tokens: int
    """EOD tokens included."""
    text_bytes: int
    """UTF-8 bytes of the documents' text: turns a loss per token into bits per byte."""
    words: int
    """Words divided by white space: turns a loss per token into word perplexity."""


@dataclass(frozen=True)
class DatasetMeta:
    """Contents of `<prefix>.meta.json`."""

    tokenizer_digest: str
    tokenizer_name: str
    vocab_size: int
    """Largest possible id plus one, added tokens included."""
    eod_id: int
    splits: dict[str, SplitMeta]
    skipped: dict[str, int] = field(default_factory=dict)
    """Documents left out, by reason."""
    source: list[dict] = field(default_factory=list)
    """Per input: its name, and its size and SHA-256 where it is a file."""
    options: dict = field(default_factory=dict)
    """Options that decide the content: seed, val_fraction, text_key, ..."""
    format_version: int = FORMAT_VERSION


def base_prefix(prefix: str | os.PathLike) -> str:
    """`P` for `P_train`, `P_val` and `P`."""
    name = os.fspath(prefix)
    for split in SPLITS:
        name = name.removesuffix(f"_{split}")
    return name


def meta_path(prefix: str | os.PathLike) -> Path:
    """The meta.json that describes a prefix or either of its splits."""
    return Path(f"{base_prefix(prefix)}.meta.json")


def write_meta(prefix: str | os.PathLike, meta: DatasetMeta) -> None:
    """Write the meta.json of a prefix, atomically."""
    write_json(meta_path(prefix), dataclasses.asdict(meta))


def load_meta(prefix: str | os.PathLike) -> DatasetMeta | None:
    """The meta.json of a prefix; None where there is none, as for data made by another program.

    Raises InputError for a damaged file or one of a later version.
    """
    path = meta_path(prefix)
    if not path.is_file():
        return None
    try:
        values = read_json(path)
        if values["format_version"] > FORMAT_VERSION:
            raise InputError(f"{path} has format version {values['format_version']}; this version reads up to {FORMAT_VERSION}")
        splits = {name: SplitMeta(**counts) for name, counts in values["splits"].items()}
        return DatasetMeta(**(values | {"splits": splits}))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}: {error}); preprocess the data again") from None


def find_split(data_path: str | os.PathLike, split: str, *, allow_bare: bool = True) -> str:
    """Prefix of the `train` or `val` pair of a dataset: `P_<split>`, or with `allow_bare` a pair `P` made by another program.

    A bare pair serves whole as whatever split is asked for, so callers that would then validate on training data forbid it.
    Raises InputError where there is neither, naming the command that makes the data.
    """
    data_path = os.fspath(data_path)
    prefix = f"{data_path}_{split}"
    if idx_path(prefix).exists():
        if not meta_path(data_path).is_file():
            raise InputError(
                f"{prefix} has no {meta_path(data_path)} beside it, so its preprocessing did not finish: run it again with --overwrite, "
                f"or name {prefix} itself if another program made it"
            )
        return prefix
    if not idx_path(data_path).exists():
        raise InputError(
            f"no dataset at --data_path={data_path}: neither {idx_path(prefix)} nor {idx_path(data_path)} exists; make it with "
            f"`python tools/preprocess_owt.py --input TEXT.jsonl --output_prefix {data_path} --tokenizer TEACHER`"
        )
    if not allow_bare:
        raise InputError(f"--data_path={data_path} is one bare pair without a {split} split; name a dataset that has {idx_path(prefix)}")
    if load_meta(data_path) is None:
        logger.warning("%s has no %s: nothing says which tokenizer made it; its ids are taken as they are", data_path, meta_path(data_path))
    return data_path


def tokenizer_digest(tokenizer) -> str:
    """SHA-256 over what a Hugging Face tokenizer does rather than how it is stored.

    Covers the vocabulary with added tokens and the ids of a probe text, so that saving by another version of a library changes nothing.
    """
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    probe = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    return hashlib.sha256(json.dumps([vocabulary, probe]).encode()).hexdigest()


def end_of_documents(prefixes: Sequence[str], tokenizer, tokenizer_source: str) -> int:
    """The token that ends each document of all these data; data of other programs is taken to use the tokenizer's own.

    For --reset_at_documents.  Raises InputError where there is none, or not the same one.
    """
    found = {}
    for prefix in prefixes:
        meta = load_meta(prefix)
        if meta is not None and not meta.options.get("append_eod", True):
            raise InputError(f"--reset_at_documents: {prefix} was made without a token at the end of documents; preprocess it with one")
        found[prefix] = getattr(tokenizer, "eos_token_id", None) if meta is None else meta.eod_id
    if None in found.values():
        raise InputError(f"--reset_at_documents needs a token that ends documents; {tokenizer_source} names none (eos_token)")
    if len(set(found.values())) > 1:
        raise InputError(f"--reset_at_documents: documents end with other tokens in each of {found}; preprocess them alike")
    return found[prefixes[0]]


def check_tokenizer(meta: DatasetMeta, digest: str, where: str) -> None:
    """Refuse a dataset made with another tokenizer than the one at `where` (such as `the teacher EleutherAI/pythia-1b`)."""
    if meta.tokenizer_digest != digest:
        raise InputError(
            f"the dataset was made with tokenizer {meta.tokenizer_name} (digest {meta.tokenizer_digest[:12]}), not with that of {where} "
            f"(digest {digest[:12]}); preprocess the text again with --tokenizer set to that model"
        )


def dataset_digest(prefix: str | os.PathLike) -> dict:
    """Identity of a pair for the record of a run: sizes of both files, the SHA-256 of .idx, and one of blocks spread over .bin.

    The blocks tell corpora apart whose documents all have one length, and so equal .idx files, without reading terabytes.
    """
    dataset = IndexedDataset(prefix)
    return {
        "prefix": os.fspath(prefix),
        "documents": dataset.num_documents,
        "tokens": dataset.num_tokens,
        "bin_bytes": bin_path(prefix).stat().st_size,
        "idx_bytes": idx_path(prefix).stat().st_size,
        "idx_sha256": sha256_file(idx_path(prefix)),
        "bin_blocks_sha256": _blocks_digest(bin_path(prefix)),
    }


def _blocks_digest(path: Path) -> str:
    """SHA-256 of _NUM_BLOCKS blocks at equal distances, the first and last bytes among them."""
    digest = hashlib.sha256()
    last_start = max(0, path.stat().st_size - _BLOCK_BYTES)
    with open(path, "rb") as handle:
        for start in sorted({last_start * block // (_NUM_BLOCKS - 1) for block in range(_NUM_BLOCKS)}):
            handle.seek(start)
            digest.update(handle.read(_BLOCK_BYTES))
    return digest.hexdigest()
