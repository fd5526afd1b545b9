"""Everything behind scripts/evaluate.py: score a model on a split and on tasks, and its teacher after it."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator

import torch

from megahedge.data.loader import Batch, ValidationData
from megahedge.data.meta import DatasetMeta, check_documents, check_tokenizer, dataset_digest, find_split, load_meta, tokenizer_digest
from megahedge.data.tokenizer import load_tokenizer
from megahedge.evaluation import lm_eval
from megahedge.evaluation.context_probe import ContextProbe, probe_context
from megahedge.evaluation.models import OpenModel, open_model
from megahedge.evaluation.options import EvaluateOptions
from megahedge.evaluation.perplexity import measure_perplexity
from megahedge.evaluation.report import Evaluation
from megahedge.evaluation.tasks import expand_names
from megahedge.evaluation.text import count_text
from megahedge.utils.errors import InputError, RunError, blamed_on
from megahedge.utils.labels import IGNORE_INDEX
from megahedge.utils.logging import get_logger
from megahedge.utils.progress import ProgressBar

logger = get_logger(__name__)


def evaluate(options: EvaluateOptions) -> Evaluation:
    """Score the model and, where one is given, its teacher; one of them at a time is in memory.

    Raises InputError for a model, data or tasks that cannot be had or do not fit each other, RunError for a loss of NaN.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = None if options.scored_data is None else find_split(options.scored_data, options.split)
    found = _find_tasks(options)
    if options.teacher is not None:  # opened and let go: what is wrong with it would else be found after hours
        _open_fitting(options, "teacher", data, device)
    model = _open_fitting(options, "model", data, device)
    with found.load(options.num_fewshot) if found else contextlib.nullcontext() as tasks:
        evaluation = _evaluate_model(options, model, data, tasks, device)
        del model
        if options.teacher is None:
            return evaluation
        teacher = _open_fitting(options, "teacher", data, device)
        return dataclasses.replace(evaluation, teacher=_evaluate_model(options, teacher, data, tasks, device))


def _find_tasks(options: EvaluateOptions):
    """What lm-eval knows under the names; None where no tasks are asked for."""
    if not options.tasks:
        return None
    lm_eval.check_installed()
    from megahedge.evaluation.lm_eval.data import find_tasks  # takes seconds to import, so only where it is wanted

    return find_tasks(expand_names(options.tasks), options.include_path, options.offline_data)


def _open_fitting(options: EvaluateOptions, option: str, data: str | None, device: torch.device) -> OpenModel:
    """The model that --model or --teacher names, if it can read the data and the tasks.  Raises InputError."""
    name = getattr(options, option)
    with blamed_on(option):
        model = open_model(name, options.implementation, options.dtype, device)
        if options.tasks and model.tokenizer is None:
            raise InputError(f"{model.source.path} has no tokenizer with it, so tasks cannot be put to it")
    if data is None:
        return model
    if model.max_seq_len is not None and options.seq_len > model.max_seq_len:
        raise InputError(f"--seq_len={options.seq_len} is longer than the max_position_embeddings={model.max_seq_len} of {name}")
    meta = load_meta(data)
    if meta is not None:
        _check_vocabulary(model, meta, name)
    return model


def _check_vocabulary(model: OpenModel, meta: DatasetMeta, name: str) -> None:
    if model.tokenizer_digest is not None:
        check_tokenizer(meta, model.tokenizer_digest, name, model.tokenizer)
    if meta.vocab_size > model.vocab_size:
        made_with = f"tokenizer {meta.tokenizer_name} of {meta.vocab_size} tokens"
        raise InputError(f"--data_path was made with {made_with}; {name} has vocab_size={model.vocab_size}")


def _evaluate_model(options: EvaluateOptions, model: OpenModel, data: str | None, tasks, device: torch.device) -> Evaluation:
    """Figures of one model on the pair `data` and on the loaded tasks, either of which may be None."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    evaluation = Evaluation(options, model.source, model.tokenizer_digest, name)
    if data is not None:
        evaluation = _measure(evaluation, model, data, device)
    if tasks is None:
        return evaluation
    from megahedge.evaluation.lm_eval.scores import score_tasks

    started = time.monotonic()
    results = score_tasks(tasks, model, options.task_options, device)
    return dataclasses.replace(evaluation, tasks=results, tasks_seconds=time.monotonic() - started)


def _measure(evaluation: Evaluation, model: OpenModel, prefix: str, device: torch.device) -> Evaluation:
    """The evaluation with what the model makes of the pair `prefix`."""
    options, meta = evaluation.options, load_meta(prefix)
    data = ValidationData(
        prefix, options.seq_len, options.eval_tokens, model.vocab_size, mark_documents=options.reset_at_documents, mmap=options.mmap
    )
    if options.reset_at_documents:
        check_documents(data.dataset, training=False)
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
    facts = dataset_digest(data.dataset) | {"tokenizer_digest": meta.tokenizer_digest if meta else None}
    probe = _probe(options, model, prefix, device) if options.context_probe else None
    return dataclasses.replace(evaluation, data=facts, perplexity=measured, text=text, probe=probe, seconds=seconds)


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
    data = ValidationData(prefix, options.seq_len, options.probe_windows * options.seq_len, model.vocab_size, mmap=options.mmap)
    batches = _shown(data.micro_batches(options.micro_batch_size), data.num_scored_tokens, "context probe")
    return probe_context(model.token_losses, batches, options.seed, device)
