"""Everything behind scripts/evaluate.py: score a model on a split, and say what was scored."""

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator

import torch

from megahedge.data.loader import Batch, ValidationData
from megahedge.data.meta import SPLITS, DatasetMeta, check_tokenizer, dataset_digest, find_split, load_meta, tokenizer_digest
from megahedge.data.tokenizer import load_tokenizer
from megahedge.evaluation.context_probe import ContextProbe, probe_context
from megahedge.evaluation.models import OpenModel, open_model
from megahedge.evaluation.perplexity import Perplexity, measure_perplexity
from megahedge.evaluation.text import TextCounts, count_text
from megahedge.utils.cli import Count
from megahedge.utils.errors import InputError, RunError
from megahedge.utils.files import check_output
from megahedge.utils.labels import IGNORE_INDEX
from megahedge.utils.logging import get_logger
from megahedge.utils.progress import ProgressBar

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """scripts/evaluate.py"""

    model: str
    """Run folder, one of its checkpoints, Hugging Face folder, or hub name."""
    data_path: str = "data/openwebtext"
    """Prefix of indexed data made by tools/preprocess_owt.py."""
    split: str = "val"
    """Pair of the data to score: val or train."""
    seq_len: int = 1024
    """Tokens per window; windows do not overlap, and the model sees nothing before its window."""
    eval_tokens: Count | None = None
    """Score the first so many tokens only; all of the split by default."""
    micro_batch_size: int = 4
    """Windows per forward; changes speed and memory, not the figures."""
    dtype: str = "fp32"
    """Precision of parameters and activations: fp32 or bf16; losses are summed in fp64."""
    implementation: str = "auto"
    """Whose forward pass scores a Hugging Face folder: megahedge, transformers, or auto (megahedge for the families that it knows)."""
    context_probe: bool = False
    """Measure too by how much the second half of a window suffers when its first half is shuffled."""
    probe_windows: int = 200
    """Windows of the probe: the first so many whole ones of the split."""
    seed: int = 1234
    """Seed of the probe's shuffling."""
    output: str | None = None
    """JSON file for figures, options, versions and digests; replaced if it exists."""

    def __post_init__(self):
        if self.split not in SPLITS:
            raise InputError(f"--split={self.split} is not known; use {' or '.join(SPLITS)}")
        least = {"seq_len": 2 if self.context_probe else 1, "micro_batch_size": 1, "eval_tokens": 1, "probe_windows": 2, "seed": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise InputError(f"--{name}={value} must be at least {lowest}")
        if self.output is not None:
            check_output("output", self.output, self.output, overwrite=True)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was measured, on what."""

    options: EvaluateOptions
    model: OpenModel
    data: dict
    """Identity of the scored pair."""
    perplexity: Perplexity
    text: TextCounts | None
    """Text of the scored tokens; None where no tokenizer is at hand to decode them."""
    probe: ContextProbe | None
    device: str
    seconds: float
    """Time that scoring took, the probe left out."""

    def figures(self) -> dict:
        """The measured numbers; None where one is unknown or infinite."""
        measured, text = self.perplexity, self.text
        figures = {
            "loss": measured.loss,
            "token_perplexity": measured.token_perplexity,
            "word_perplexity": measured.word_perplexity(text.words) if text and text.words else math.inf,
            "bits_per_byte": measured.bits_per_byte(text.text_bytes) if text and text.text_bytes else math.inf,
        }
        figures = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        counts = {"words": text.words, "text_bytes": text.text_bytes} if text else {"words": None, "text_bytes": None}
        return {**figures, "nats": measured.nats, "tokens": measured.tokens, **counts}

    def record(self) -> dict:
        """For JSON."""
        probe = self.probe and {**dataclasses.asdict(self.probe), "difference": self.probe.difference}
        return {
            "figures": self.figures(),
            "context_probe": probe,
            "model": dataclasses.asdict(self.model.source) | {"tokenizer_digest": self.model.tokenizer_digest},
            "data": self.data,
            "options": dataclasses.asdict(self.options),
            "device": self.device,
            "seconds": self.seconds,
        }

    def table(self) -> str:
        """For people."""
        figures, source, options = self.figures(), self.model.source, self.options
        step = "" if source.step is None else f", step {source.step}"
        text = f", {figures['words']} words, {figures['text_bytes']} bytes" if self.text else ""
        rows = {
            "model": f"{source.path} ({source.kind}{step})",
            "weights": f"{source.loaded} tensors loaded, {source.missing} missing, {source.unexpected} unexpected",
            "scored by": f"{source.implementation}, {options.dtype} on {self.device}",
            "data": f"{self.data['prefix']}, windows of {options.seq_len}",
            "scored": f"{figures['tokens']} tokens{text}",
            "loss": f"{figures['loss']:.5f} nats per token",
            "token perplexity": _show(figures["token_perplexity"]),
            "word perplexity": _show(figures["word_perplexity"]),
            "bits per byte": _show(figures["bits_per_byte"]),
        }
        if self.probe:
            rows["context probe"] = (
                f"second half {self.probe.intact:.4f} nats, with the first half shuffled {self.probe.shuffled:.4f}: "
                f"{self.probe.difference:+.4f} ± {self.probe.standard_error:.4f} (standard error, {self.probe.windows} windows)"
            )
        return "\n".join(f"{label:<17} {value}" for label, value in rows.items())


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def evaluate(options: EvaluateOptions) -> Evaluation:
    """Score the model.  Raises InputError for a model or data that cannot be had or do not fit each other, RunError for a loss of NaN."""
    prefix = find_split(options.data_path, options.split)
    meta = load_meta(prefix)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = open_model(options.model, options.implementation, options.dtype, device)
    _check_fit(options, model, meta)
    data = ValidationData(prefix, options.seq_len, options.eval_tokens, model.vocab_size)
    tokenizer = model.tokenizer or _tokenizer_of(meta)
    text = None
    if tokenizer is not None:  # token 0 has no prediction, so tokens 1 … num_scored_tokens are the scored ones
        eod_id = meta.eod_id if meta else tokenizer.eos_token_id
        text = count_text(data.dataset, 1, 1 + data.num_scored_tokens, tokenizer, eod_id)
    started = time.monotonic()
    batches = _shown(data.micro_batches(options.micro_batch_size), data.num_scored_tokens, "scoring")
    measured = measure_perplexity(model.token_losses, batches, device)
    seconds = time.monotonic() - started
    if not math.isfinite(measured.nats):
        raise RunError(
            f"the loss of {model.source.path} on {prefix} is {measured.nats}: the model is broken, or --dtype={options.dtype} overflows"
        )
    facts = dataset_digest(prefix) | {"tokenizer_digest": meta.tokenizer_digest if meta else None}
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    probe = _probe(options, model, prefix, device) if options.context_probe else None
    return Evaluation(options, model, facts, measured, text, probe, name, seconds)


def _check_fit(options: EvaluateOptions, model: OpenModel, meta: DatasetMeta | None) -> None:
    if model.max_seq_len is not None and options.seq_len > model.max_seq_len:
        raise InputError(f"--seq_len={options.seq_len} is longer than the model's max_position_embeddings={model.max_seq_len}")
    if meta is None:
        return
    if model.tokenizer_digest is not None:
        check_tokenizer(meta, model.tokenizer_digest, f"--model {options.model}")
    if meta.vocab_size > model.vocab_size:
        made_with = f"tokenizer {meta.tokenizer_name} of {meta.vocab_size} tokens"
        raise InputError(f"--data_path was made with {made_with}; the model has vocab_size={model.vocab_size}")


def _tokenizer_of(meta: DatasetMeta | None):
    """The tokenizer that made the data, if it can still be had; without it only the figures per token are known."""
    if meta is None:
        logger.warning("neither model nor data have a tokenizer: word perplexity and bits per byte are left out")
        return None
    try:
        tokenizer = load_tokenizer(meta.tokenizer_name)
        check_tokenizer(meta, tokenizer_digest(tokenizer), meta.tokenizer_name)
    except InputError as error:
        logger.warning("word perplexity and bits per byte are left out: %s", error)
        return None
    return tokenizer


def _shown(batches: Iterable[Batch], total: int, description: str) -> Iterator[Batch]:
    """The same batches, with progress on the terminal."""
    progress = ProgressBar(total, "tokens", description=description)
    for batch in batches:
        yield batch
        progress.update(int((batch.labels != IGNORE_INDEX).sum()))
    progress.close()


def _probe(options: EvaluateOptions, model: OpenModel, prefix: str, device: torch.device) -> ContextProbe:
    data = ValidationData(prefix, options.seq_len, options.probe_windows * options.seq_len, model.vocab_size)
    batches = _shown(data.micro_batches(options.micro_batch_size), data.num_scored_tokens, "context probe")
    return probe_context(model.token_losses, batches, options.seed, device)
