"""What is known about a dataset beside its tokens: `<prefix>.meta.json`, and which of its two pairs serves which purpose."""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megahedge.data.indexed_dataset import IndexedDataset, bin_path, blocks_digest, idx_path
from megahedge.data.indexed_writer import publish_pair, remove_unfinished
from megahedge.utils.errors import InputError
from megahedge.utils.files import disk_errors_explained, file_lock, read_json, remove_temporary_files, write_json
from megahedge.utils.logging import get_logger

FORMAT_VERSION = 2
"""2: with the percentiles of document lengths and the number of EOD tokens."""
SPLITS = ("train", "val")
SENTENCEPIECE = "sentencepiece:"
"""Before the digest of a SentencePiece model."""
_SAMPLED_BLOCKS, _SAMPLED_TOKENS = 64, 1 << 14
_LOOKED_AT, _MIN_ROWS = 1 << 20, 16
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
    eod_tokens: int | None = None
    """EOD tokens among them; None where no one has counted."""
    tokens_per_document: dict[str, int] = field(default_factory=dict)
    """Percentiles of the documents' lengths."""
    bin_sha256: str | None = None
    """SHA-256 of the .bin file, which tells a token from another; None where no one has read it."""


COUNTS = ("documents", "tokens", "text_bytes", "words", "eod_tokens")
"""Fields of SplitMeta that are sums over documents."""


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


_PERCENTILES = {"min": 0, "p10": 10, "p50": 50, "p90": 90, "p99": 99, "max": 100}


def tokens_per_document(blocks: Iterable[np.ndarray]) -> dict[str, int]:
    """Percentiles of document lengths, each the length of some document; empty where there is none.

    blocks: the lengths, in blocks; what is kept of them are the lengths that occur, and how often.
    """
    counts = collections.Counter()
    for block in blocks:
        lengths, times = np.unique(block, return_counts=True)
        counts.update(dict(zip(lengths.tolist(), times.tolist(), strict=True)))
    if not counts:
        return {}
    lengths = sorted(counts)
    reached = np.cumsum([counts[length] for length in lengths])
    places = {name: int(np.searchsorted(reached, share * reached[-1] / 100)) for name, share in _PERCENTILES.items()}
    return {name: lengths[place] for name, place in places.items()}


def describe(counts: SplitMeta) -> str:
    """The counts of a pair in one line."""
    text = f"{counts.documents} documents, {counts.tokens} tokens"
    if counts.eod_tokens is not None and counts.tokens:
        text += (
            f", one in {counts.tokens / counts.eod_tokens:.0f} ends a document" if counts.eod_tokens else ", none of which ends a document"
        )
    if counts.tokens_per_document:
        text += "; tokens a document: " + ", ".join(f"{name} {value}" for name, value in counts.tokens_per_document.items())
    return text


def eod_density(dataset: IndexedDataset, eod_id: int) -> str:
    """How often the token that ends documents occurs, told from blocks spread over the data."""
    seen, found = count_eod(dataset, eod_id)
    tokens = f"all {seen} tokens" if seen == dataset.num_tokens else f"{seen} tokens looked at"
    return f"one in {seen / found:.0f} of {tokens}" if found else f"none in {tokens}"


def count_eod(dataset: IndexedDataset, eod_id: int) -> tuple[int, int]:
    """How many tokens were looked at, in blocks spread over the data, and how many of them end a document."""
    seen = found = 0
    for tokens in _sampled(dataset):
        seen, found = seen + len(tokens), found + int(np.count_nonzero(tokens == eod_id))
    return seen, found


def _sampled(dataset: IndexedDataset) -> Iterator[np.ndarray]:
    last = dataset.num_tokens - _SAMPLED_TOKENS
    if last * 2 <= _SAMPLED_BLOCKS * _SAMPLED_TOKENS:
        yield dataset.read(0, dataset.num_tokens)
        return
    yield from (dataset.read(last * block // (_SAMPLED_BLOCKS - 1), _SAMPLED_TOKENS) for block in range(_SAMPLED_BLOCKS))


def check_output_prefix(prefix: str) -> None:
    """Raise InputError for a prefix under which a dataset could not be found again."""
    name = os.path.basename(prefix)
    if name in ("", ".", ".."):
        raise InputError(f"--output_prefix={prefix!r} must end in a name, such as data/openwebtext")
    for split in SPLITS:
        if name.endswith(f"_{split}"):
            raise InputError(f"--output_prefix={prefix} must not end in _{split}, which is the name of a dataset's own pair")


@contextlib.contextmanager
def writing_dataset(prefix: str | os.PathLike) -> Iterator[None]:
    """Keep other commands from writing the same dataset.  Raises InputError where one is at it, or the place may not be written."""
    prefix = Path(prefix)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(prefix.with_name(f".{prefix.name}.lock"), blocking=False, remove=True))
        except BlockingIOError:
            raise InputError(f"another process is writing {prefix}; wait for it or choose another --output_prefix") from None
        except OSError as error:
            raise InputError(f"--output_prefix={prefix} cannot be written: {error.strerror}") from None
        for path in (unfinished_path(prefix), meta_path(prefix)):
            remove_temporary_files(path.parent, path.name)
        yield


def unfinished_path(prefix: str | os.PathLike) -> Path:
    """The journal of a preprocessing that has not come to its end."""
    prefix = Path(prefix)
    return prefix.with_name(f".{prefix.name}.unfinished.json")


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


def publish_dataset(prefix: str | os.PathLike, meta: DatasetMeta) -> None:
    """Make both pairs appear that lie ready under their temporary names (`IndexedDatasetWriter.prepare`), and the meta.json.

    That file, which vouches for the pairs, goes first and comes last.  A call that was killed can be made again.
    """
    pairs = [f"{os.fspath(prefix)}_{split}" for split in SPLITS]
    with disk_errors_explained(prefix):
        meta_path(prefix).unlink(missing_ok=True)
        for pair in pairs:
            publish_pair(pair)
        write_meta(prefix, meta)
    for pair in pairs:
        remove_unfinished(pair)


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
        meta = DatasetMeta(**(values | {"splits": splits}))
        _check_kinds(meta)
        return meta
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}: {error}); preprocess the data again") from None


_KINDS = {
    "tokenizer_digest": str,
    "tokenizer_name": str,
    "vocab_size": int,
    "eod_id": int,
    "skipped": dict,
    "source": list,
    "options": dict,
}


def _check_kinds(meta: DatasetMeta) -> None:
    """Raise TypeError for a value of a kind that no writer of ours has put there."""
    for name, kind in _KINDS.items():
        if not isinstance(getattr(meta, name), kind):
            raise TypeError(f"{name} is {getattr(meta, name)!r}")
    for split, counts in meta.splits.items():
        for name in COUNTS:
            if type(value := getattr(counts, name)) is not int and not (name == "eod_tokens" and value is None):
                raise TypeError(f"{name} of {split} is {value!r}")
        if not isinstance(counts.bin_sha256, str | None):
            raise TypeError(f"bin_sha256 of {split} is {counts.bin_sha256!r}")
        if not isinstance(counts.tokens_per_document, dict):
            raise TypeError(f"tokens_per_document of {split} is {counts.tokens_per_document!r}")
    if not all(type(count) is int for count in meta.skipped.values()):
        raise TypeError(f"skipped is {meta.skipped!r}")


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
                f"{prefix} has no {meta_path(data_path)} beside it, so its preprocessing did not finish: give its command again, "
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


def tokenizer_digest(tokenizer, probe: str | None = None) -> str:
    """SHA-256 over what a Hugging Face tokenizer does rather than how it is stored.

    Covers the vocabulary with added tokens and the ids of a probe text, so that saving by another version of a library changes nothing.
    """
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    ids = tokenizer(_PROBE if probe is None else probe, add_special_tokens=False)["input_ids"]
    return hashlib.sha256(json.dumps([vocabulary, ids]).encode()).hexdigest()


def check_documents(dataset: IndexedDataset, *, training: bool = True) -> None:
    """For --reset_at_documents: raise InputError where the index does not tell documents apart, so that a reset would do nothing good."""
    count = dataset.num_documents
    lengths = dataset.document_lengths(0, min(count, _LOOKED_AT))[: count - 1]  # the last row may be a shorter one
    if count == 1 and training:
        raise InputError(f"--reset_at_documents: the index of {dataset.prefix} knows one document, with nothing to reset at; leave it out")
    if count >= _MIN_ROWS and lengths.min() == lengths.max():
        raise InputError(
            f"--reset_at_documents: the {count} documents of {dataset.prefix} all have {lengths[0]} tokens; they are rows that documents "
            "have been packed into, and nothing tells where those begin; leave it out, or preprocess the text itself"
        )


def sentencepiece_digest(tokenizer) -> str:
    """What `tokenizer_digest` is of a SentencePiece model; of another tokenizer, what it would be were it such a model.

    Only Hugging Face tokenizers make one token of `</s>` in a text, which is therefore not asked for.
    """
    return SENTENCEPIECE + tokenizer_digest(tokenizer, _PROBE.replace("</s>", ""))


def check_tokenizer(meta: DatasetMeta, digest: str, where: str, tokenizer=None, dataset: str = "the dataset") -> None:
    """Refuse a dataset made with another tokenizer than the one at `where` (such as `the teacher EleutherAI/pythia-1b`).

    tokenizer: that one, where it is at hand; it is asked where the data was made with a SentencePiece model.  dataset: its name.
    """
    of_model = meta.tokenizer_digest.startswith(SENTENCEPIECE)
    if meta.tokenizer_digest == (sentencepiece_digest(tokenizer) if of_model and tokenizer is not None else digest):
        return
    kind = "the SentencePiece model" if of_model else "tokenizer"
    raise InputError(
        f"{dataset} was made with {kind} {meta.tokenizer_name} (digest {_brief(meta.tokenizer_digest)}), not with that of {where} "
        f"(digest {_brief(digest)}); preprocess the text again with --tokenizer set to that model"
    )


def _brief(digest: str) -> str:
    return digest.removeprefix(SENTENCEPIECE)[:12]


def dataset_digest(dataset: IndexedDataset) -> dict:
    """Identity of a pair for the record of a run: sizes of both files, the SHA-256 of .idx, and one of blocks spread over .bin.

    The blocks tell corpora apart whose documents all have one length, and so equal .idx files, without reading terabytes.
    """
    return {
        "prefix": dataset.prefix,
        "documents": dataset.num_documents,
        "tokens": dataset.num_tokens,
        "bin_bytes": bin_path(dataset.prefix).stat().st_size,
        "idx_bytes": idx_path(dataset.prefix).stat().st_size,
        "idx_sha256": dataset.index_digest,
        "bin_blocks_sha256": blocks_digest(bin_path(dataset.prefix)),
    }
