"""Everything behind scripts/evaluate.py: score a model on a split and on tasks, beside its teacher, and say what was scored."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from megahedge.checkpoint.store import MANIFEST
from megahedge.data.loader import Batch, ValidationData
from megahedge.data.meta import SPLITS, DatasetMeta, check_tokenizer, dataset_digest, find_split, load_meta, tokenizer_digest
from megahedge.data.tokenizer import load_tokenizer
from megahedge.evaluation.context_probe import ContextProbe, probe_context
from megahedge.evaluation.models import OpenModel, open_model
from megahedge.evaluation.perplexity import Perplexity, measure_perplexity
from megahedge.evaluation.tasks import TaskResults, compare_results, expand_names, tasks_table
from megahedge.evaluation.text import TextCounts, count_text
from megahedge.models.hf_weights import weights_digest
from megahedge.utils.cli import Count
from megahedge.utils.errors import InputError, RunError
from megahedge.utils.files import check_output, read_json_object
from megahedge.utils.labels import IGNORE_INDEX
from megahedge.utils.logging import get_logger
from megahedge.utils.progress import ProgressBar

logger = get_logger(__name__)

DEFAULT_DATA = "data/openwebtext"
_FOR_TASKS = ("include_path", "offline_data", "limit", "num_fewshot")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """scripts/evaluate.py"""

    model: str
    """Run folder, one of its checkpoints, Hugging Face folder, or hub name."""
    teacher: str | None = None
    """A second model of the same kinds, scored on the same data and tasks and compared with the first."""
    data_path: str | None = None
    """Prefix of indexed data made by tools/preprocess_owt.py, to measure perplexity on; data/openwebtext where no --tasks are asked for."""
    split: str = "val"
    """Pair of the data to score: val or train."""
    seq_len: int = 1024
    """Tokens per window; windows do not overlap, and the model sees nothing before its window."""
    eval_tokens: Count | None = None
    """Score the first so many tokens only; all of the split by default."""
    micro_batch_size: int = 4
    """Windows, or inputs of tasks at their longest, per forward; changes speed and memory, not the figures."""
    dtype: str = "fp32"
    """Precision of parameters and activations: fp32 or bf16; losses are summed in fp64."""
    implementation: str = "auto"
    """Whose forward pass scores a Hugging Face folder: megahedge, transformers, or auto (megahedge for the families that it knows)."""
    context_probe: bool = False
    """Measure too by how much the second half of a window suffers when its first half is shuffled."""
    probe_windows: int = 200
    """Windows of the probe: the first so many whole ones of the split."""
    seed: int = 1234
    """Seed of the probe's shuffling, and of the choice of worked examples."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval (the extra `eval`) by name; `paper` stands for the ten of the paper."""
    offline_data: str | None = None
    """Folder of JSON lines, <task>.jsonl, that take the place of each task's data set; nothing is downloaded then."""
    include_path: str | None = None
    """Folder of task files (.yaml) of your own, in lm-eval's format."""
    limit: Count | None = None
    """Score the first so many rows of each task only; all by default."""
    num_fewshot: int | None = None
    """Worked examples before each question of a task; by default what the task says, mostly 0."""
    bootstrap_iters: int = 1000
    """Resamplings behind the standard error of metrics that are no means, such as LAMBADA's perplexity (the paper: 100000)."""
    output: str | None = None
    """JSON file for figures, options, versions and digests; replaced if it exists."""

    def __post_init__(self):
        if self.split not in SPLITS:
            raise InputError(f"--split={self.split} is not known; use {' or '.join(SPLITS)}")
        least = {"seq_len": 2 if self.context_probe else 1, "micro_batch_size": 1, "eval_tokens": 1, "probe_windows": 2, "seed": 0}
        least |= {"limit": 1, "num_fewshot": 0, "bootstrap_iters": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise InputError(f"--{name}={value} must be at least {lowest}")
        expand_names(self.tasks)
        if not self.tasks:
            alone = [name for name in _FOR_TASKS if getattr(self, name) is not None]
            if alone:
                raise InputError(f"--{alone[0]}={getattr(self, alone[0])} says how to run tasks; name some with --tasks")
        if self.context_probe and self.scored_data is None:
            raise InputError("--context_probe reads indexed data; give --data_path beside --tasks")
        if self.output is not None:
            check_output("output", self.output, self.output, overwrite=True)

    @property
    def scored_data(self) -> str | None:
        """What perplexity is measured on; None where only tasks are asked for."""
        return self.data_path if self.data_path is not None or self.tasks else DEFAULT_DATA


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was measured, on what."""

    options: EvaluateOptions
    model: OpenModel
    device: str
    data: dict | None = None
    """Identity of the scored pair; None, like what it is scored by, where only tasks were asked for."""
    perplexity: Perplexity | None = None
    text: TextCounts | None = None
    """Text of the scored tokens; None where no tokenizer is at hand to decode them."""
    probe: ContextProbe | None = None
    seconds: float | None = None
    """Time that scoring the data took, the probe left out."""
    tasks: TaskResults | None = None
    tasks_seconds: float | None = None
    teacher: "Evaluation | None" = None

    def figures(self) -> dict:
        """The numbers measured on the data; None where one is unknown or infinite."""
        if self.perplexity is None:
            return {}
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
        record = self._record_of_model() | {"options": dataclasses.asdict(self.options), "device": self.device}
        if self.teacher is not None:
            record |= {"teacher": self.teacher._record_of_model(), "against_teacher": self._against_teacher()}
        return record

    def _record_of_model(self) -> dict:
        source = self.model.source
        digests = {"tokenizer_digest": self.model.tokenizer_digest, "weights_digest": _digest_of_weights(Path(source.path))}
        return {
            "figures": self.figures() or None,
            "context_probe": self.probe and {**dataclasses.asdict(self.probe), "difference": self.probe.difference},
            "tasks": self.tasks and self.tasks.record(),
            "model": dataclasses.asdict(source) | digests,
            "data": self.data,
            "seconds": self.seconds,
            "tasks_seconds": self.tasks_seconds,
        }

    def _against_teacher(self) -> dict:
        """Differences and ratios of all figures."""
        ours, theirs = self.figures(), self.teacher.figures()
        names = ("loss", "token_perplexity", "word_perplexity", "bits_per_byte")
        known = [name for name in names if ours.get(name) is not None and theirs.get(name) is not None]
        figures = {name: {"value": ours[name] - theirs[name], "ratio": ours[name] / theirs[name]} for name in known}
        return {"figures": figures, "tasks": compare_results(self.tasks, self.teacher.tasks) if self.tasks else None}

    def table(self) -> str:
        """For people."""
        rows = _rows_of_model("model", self)
        if self.teacher is not None:
            rows |= _rows_of_model("teacher", self.teacher)
        rows["scored by"] = f"{self.model.source.implementation}, {self.options.dtype} on {self.device}"
        if self.perplexity is not None:
            rows |= self._rows_of_data()
        table = "\n".join(f"{label:<17} {value}" for label, value in rows.items())
        if self.tasks is None:
            return table
        return f"{table}\n\n{tasks_table(self.options.tasks, self.tasks, self.teacher and self.teacher.tasks)}"

    def _rows_of_data(self) -> dict[str, str]:
        figures = self.figures()
        text = f", {figures['words']} words, {figures['text_bytes']} bytes" if self.text else ""
        compared = self._against_teacher()["figures"] if self.teacher else {}
        of_teacher = self.teacher.figures() if self.teacher else {}
        rows = {
            "data": f"{self.data['prefix']}, windows of {self.options.seq_len}",
            "scored": f"{figures['tokens']} tokens{text}",
            "loss": f"{figures['loss']:.5f} nats per token",
            "token perplexity": _show(figures["token_perplexity"]),
            "word perplexity": _show(figures["word_perplexity"]),
            "bits per byte": _show(figures["bits_per_byte"]),
        }
        for label in rows:
            name = label.replace(" ", "_")
            if name in compared:
                difference = f"difference {compared[name]['value']:+.5f}" if name == "loss" else f"ratio {compared[name]['ratio']:.4f}"
                rows[label] += f", teacher {_show(of_teacher[name])}, {difference}"
        rows |= _row_of_probe("context probe", self.probe)
        return rows | (_row_of_probe("teacher's probe", self.teacher.probe) if self.teacher else {})


def _rows_of_model(label: str, evaluation: Evaluation) -> dict[str, str]:
    source = evaluation.model.source
    step = "" if source.step is None else f", step {source.step}"
    weights = "weights" if label == "model" else f"{label}'s weights"
    return {
        label: f"{source.path} ({source.kind}{step})",
        weights: f"{source.loaded} tensors loaded, {source.missing} missing, {source.unexpected} unexpected",
    }


def _row_of_probe(label: str, probe: ContextProbe | None) -> dict[str, str]:
    if probe is None:
        return {}
    return {
        label: f"second half {probe.intact:.4f} nats, with the first half shuffled {probe.shuffled:.4f}: "
        f"{probe.difference:+.4f} ± {probe.standard_error:.4f} (standard error, {probe.windows} windows)"
    }


def _digest_of_weights(folder: Path) -> str:
    """Identity of the weights in a checkpoint, or in a Hugging Face folder: there the one that runs record of their teacher."""
    if (folder / MANIFEST).is_file():
        return read_json_object(folder / MANIFEST)["sha256"]  # over a list that holds the digest of every file
    return weights_digest(folder)


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def evaluate(options: EvaluateOptions) -> Evaluation:
    """Score the model and, where one is given, its teacher.

    Raises InputError for a model, data or tasks that cannot be had or do not fit each other, RunError for a loss of NaN.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [options.model, *([options.teacher] if options.teacher is not None else [])]
    with contextlib.ExitStack() as stack:
        tasks = None
        if options.tasks:
            from megahedge.evaluation import lm_eval_tasks  # takes seconds to import, so only where it is wanted

            tasks = stack.enter_context(lm_eval_tasks.load_tasks(expand_names(options.tasks), options.include_path, options.offline_data))
        # all are opened before any is scored: what is wrong with the last would else be found after hours
        models = [open_model(name, options.implementation, options.dtype, device) for name in names]
        evaluations = [_evaluate_model(options, model, tasks, device) for model in models]
    return dataclasses.replace(evaluations[0], teacher=evaluations[1] if len(evaluations) > 1 else None)


def _evaluate_model(options: EvaluateOptions, model: OpenModel, tasks, device: torch.device) -> Evaluation:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    evaluation = Evaluation(options, model, name)
    if options.scored_data is not None:
        evaluation = _measure(evaluation, find_split(options.scored_data, options.split), device)
    if tasks is None:
        return evaluation
    from megahedge.evaluation.lm_eval_tasks import score_tasks

    started = time.monotonic()
    results = score_tasks(
        tasks,
        model,
        batch_size=options.micro_batch_size,
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        bootstrap_iters=options.bootstrap_iters,
        seed=options.seed,
        device=device,
    )
    return dataclasses.replace(evaluation, tasks=results, tasks_seconds=time.monotonic() - started)


def _measure(evaluation: Evaluation, prefix: str, device: torch.device) -> Evaluation:
    """The evaluation with what the model makes of the pair `prefix`."""
    options, model = evaluation.options, evaluation.model
    meta = load_meta(prefix)
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
    probe = _probe(options, model, prefix, device) if options.context_probe else None
    return dataclasses.replace(evaluation, data=facts, perplexity=measured, text=text, probe=probe, seconds=seconds)


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
