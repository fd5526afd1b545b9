"""The training loop that every stage runs in: step, measure, evaluate, save, stop when asked."""

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from megahedge.config.options import TrainOptions
from megahedge.data.loader import BatchLoader
from megahedge.evaluation.perplexity import Perplexity
from megahedge.training.checkpointing import BestCheckpoint, Extras, Progress, save_checkpoint
from megahedge.training.distributed import on_first_rank
from megahedge.training.engine import StepResult, TrainingEngine
from megahedge.training.metrics import MetricsLog, loss_of_evaluation
from megahedge.training.optim import learning_rate
from megahedge.training.run_folder import RunFolder
from megahedge.training.signals import StopSignal
from megahedge.training.timing import STEP_PARTS, peak_memory_gib
from megahedge.utils.errors import RunError
from megahedge.utils.files import finite_or_none, write_json
from megahedge.utils.logging import get_logger, log_agreed
from megahedge.utils.progress import ProgressBar
from megahedge.utils.units import format_seconds

logger = get_logger(__name__)

MAX_SKIPPED_IN_A_ROW = 10


@dataclasses.dataclass(frozen=True)
class Job:
    """What the loop needs of a run, ready to go."""

    options: TrainOptions
    engine: TrainingEngine
    student: torch.nn.Module
    """Whose parameters a checkpoint holds."""
    loader: BatchLoader
    evaluate: Callable[[], Perplexity]
    """Scores the validation split; collective."""
    run: RunFolder
    metrics: MetricsLog | None
    """On rank 0."""
    record: dict
    """What a checkpoint says beside its tensors: model, stage, data."""
    peak_tflops: float | None = None
    """What a rank's device can do, 10¹² operations a second; None where that is not known."""
    extras: Extras = dataclasses.field(default_factory=Extras)
    """What a checkpoint holds besides what trains."""
    stop: StopSignal = dataclasses.field(default_factory=StopSignal)
    """Whether this rank has been asked to stop."""


def train(job: Job, progress: Progress) -> Progress:
    """Run steps `progress.step + 1` to the last that the token budget pays for, or until asked to stop; save at the end.

    Writes the summary of a run that has used its budget, or has diverged.  Returns where the run stands.
    Raises RunError after MAX_SKIPPED_IN_A_ROW steps in a row without a finite loss and gradient, or where no step had one, or where the
    validation loss is not finite at the start or at the end.
    """
    options, total_steps = job.options, job.options.train_steps
    first_rank = dist.get_rank() == 0
    started = time.monotonic()
    last_step = min(total_steps, options.stop_after or total_steps)
    measured = None
    best = None
    if options.keep_best:
        best = BestCheckpoint(job.run.checkpoints, options.keep_last, functools.partial(loss_of_evaluation, job.run.metrics_file))
    if job.engine.any_rank(job.stop.requested):
        log_agreed(logger, logging.WARNING, "asked to stop by a signal before the first step: nothing to save; --resume begins here again")
        return progress
    if options.stop_after is not None and progress.step >= last_step < total_steps:
        log_agreed(logger, logging.WARNING, "--stop_after=%s: the run stands at step %d already", options.stop_after, progress.step)
    if progress.step == 0 or progress.evaluation_due:
        progress = dataclasses.replace(progress, evaluation_due=False)
        measured = _evaluate(job, progress)
        if best is not None and progress.step > 0:
            best.consider(progress.step, measured.loss, is_written=True, save=lambda: True)  # it is where the run has resumed
        if progress.step == 0 and not math.isfinite(measured.loss):
            raise RunError(
                f"the validation loss is {measured.loss} before the first step: the weights that the run starts from hold NaN or "
                f"infinity, or overflow in --dtype {options.dtype}"
            )
    all_tokens = total_steps * options.tokens_per_step
    speed = _Speed(job)
    bar = ProgressBar(all_tokens, "tokens", initial=progress.tokens, description="training", enabled=first_rank)
    while progress.step < last_step:
        step = progress.step + 1
        # dropout and the like draw from a state that is a function of the step, so a restart needs no saved generators
        torch.manual_seed((options.seed << 32) + (step << 12) + dist.get_rank())
        lr = learning_rate(step, total_steps, options)
        with speed.step():
            result = job.engine.train_step(job.loader.micro_batches(progress.samples), lr, stop_requested=job.stop.requested)
        progress = _advance(progress, result, options)
        if not result.applied:
            _report_skipped(job, progress, result)
        if step % options.log_interval == 0 or step == total_steps:
            _log_step(job, progress, result, lr, speed.take())
        shown = {"loss": f"{result.loss:.4f}", "lr": f"{lr:.2e}", "grad_norm": f"{result.grad_norm:.3f}"}
        bar.update(options.tokens_per_step, **shown, step=f"{step}/{total_steps}")
        evaluate_now = step % options.eval_interval == 0 or step == total_steps
        # the checkpoint before the evaluation, which may take long: a kill, or whoever asks to stop, then costs the evaluation alone
        is_written = False
        if result.stop_requested or step % options.save_interval == 0 or step == last_step:
            saved = dataclasses.replace(progress, evaluation_due=evaluate_now)
            is_written = _save(job, saved, needed=result.stop_requested or step == last_step)
        if result.stop_requested:
            progress = saved
            log_agreed(logger, logging.WARNING, "asked to stop by a signal: saved at step %d; --resume goes on from there", step)
            break
        if evaluate_now:
            measured = _evaluate(job, progress)
            if best is not None:
                best.consider(step, measured.loss, is_written, save=functools.partial(_save, job, progress, needed=False))
    bar.close()
    logger.info("step %d of %d after %s", progress.step, total_steps, format_seconds(time.monotonic() - started))
    if progress.finished(total_steps):
        measured = measured or job.evaluate()
        _write_summary(job, progress, measured if progress.updates else None)
        if progress.updates == 0:
            raise RunError(f"none of the {progress.step} steps had a finite loss and gradient: nothing was learnt; {_advice(options)}")
        if not math.isfinite(measured.loss):
            raise RunError(f"the run has ended with a validation loss of {measured.loss}: it has diverged; {_advice(options)}")
    return progress


def _save(job: Job, progress: Progress, needed: bool) -> bool:
    """Write a checkpoint; returns whether it was written.  Raises RunError if one that the run ends on could not be written."""
    root, keep_last = job.run.checkpoints, job.options.keep_last
    on_first_rank(lambda: _mend_folder(job), f"writing to {job.run.path}")
    with job.engine.timer.host_part("save"):
        written = save_checkpoint(job.engine, job.student, root, progress, job.record, keep_last, job.extras)
    if written:
        logger.info("checkpoint of step %d written to %s", progress.step, root)
    if needed and not written:
        raise RunError(f"the run ends at step {progress.step} and its checkpoint could not be written; --resume goes on from an older one")
    return written


def _mend_folder(job: Job) -> None:
    """Weeks of work must not end in a folder that no --resume understands because somebody has tidied up meanwhile."""
    try:
        if job.run.restore_record():
            job.metrics.reopen()
            logger.error("%s was removed while the run writes there: it is written again; what else is gone stays so", job.run.record_file)
    except OSError as error:  # the checkpoint to come tells of the disk
        logger.error("%s could not be looked at: %s", job.run.path, error)


def _advance(progress: Progress, result: StepResult, options: TrainOptions) -> Progress:
    return Progress(
        step=progress.step + 1,
        samples=progress.samples + options.global_batch_size,
        tokens=progress.tokens + options.tokens_per_step,
        updates=progress.updates + result.applied,
        skipped_in_a_row=0 if result.applied else progress.skipped_in_a_row + 1,
    )


def _advice(options: TrainOptions) -> str:
    """What a user may try after a divergence."""
    ways = ["lower --lr", "raise --warmup_fraction"] + (["try --dtype fp32"] if options.dtype != "fp32" else [])
    return f"{', '.join(ways[:-1])} or {ways[-1]}, in a new --output_dir"


def _report_skipped(job: Job, progress: Progress, result: StepResult) -> None:
    samples = result.bad_samples or "not known, as only the sum of the gradients overflowed"
    log_agreed(
        logger,
        logging.WARNING,
        "step %d: loss or gradient is not finite; the update is skipped (%d skipped so far, %d in a row); samples %s",
        progress.step,
        progress.step - progress.updates,
        progress.skipped_in_a_row,
        samples,
    )
    if progress.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        _write_summary(job, progress, None)
        raise RunError(
            f"{MAX_SKIPPED_IN_A_ROW} steps in a row had a loss or gradient that is not finite, the last with samples {samples}; "
            f"{_advice(job.options)}; checkpoints of earlier steps are untouched"
        )


class _Speed:
    """How fast the steps between two lines of the log were, and where their time went.

    Seconds are those of one step, but for saves and evaluations: all of them since the last line.
    """

    def __init__(self, job: Job):
        self._job = job
        self._seconds, self._steps = 0.0, 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Within `with`, one step is taken."""
        started = time.monotonic()
        yield
        self._seconds += time.monotonic() - started
        self._steps += 1

    def take(self) -> dict[str, float]:
        """The figures for the log; what follows is counted anew."""
        job, step_seconds = self._job, self._seconds / self._steps
        tflops = job.engine.operations / step_seconds / 1e12
        figures = {"tokens_per_second": job.options.tokens_per_step / step_seconds, "tflops": tflops}
        if job.peak_tflops is not None:
            figures["mfu"] = tflops / job.peak_tflops
        figures["peak_memory_gib"] = peak_memory_gib(job.engine.device)
        for part, seconds in job.engine.timer.take().items():
            figures[f"seconds_{part}"] = seconds / self._steps if part in STEP_PARTS else seconds
        self._seconds, self._steps = 0.0, 0
        return figures


def _log_step(job: Job, progress: Progress, result: StepResult, lr: float, speed: dict[str, float]) -> None:
    if job.metrics is None:
        return
    values = {
        "loss": result.loss,
        **result.metrics,
        "lr": lr,
        "grad_norm": result.grad_norm,
        "tokens": progress.tokens,
        "skipped": progress.step - progress.updates,
        **speed,
    }
    if len(corpora := job.loader.data.tokens_by_corpus(progress.samples)) > 1:
        values["tokens_by_corpus"] = corpora
    job.metrics.write("train", progress.step, values)


def _evaluate(job: Job, progress: Progress) -> Perplexity:
    step = progress.step
    started = time.monotonic()
    with job.engine.timer.host_part("evaluation"):
        measured = job.evaluate()
    text = "step %d: validation loss %.4f, perplexity %.3f on %d tokens"
    logger.info(text, step, measured.loss, measured.token_perplexity, measured.tokens)
    if job.metrics is not None:
        values = {"loss": measured.loss, "perplexity": measured.token_perplexity, "tokens": measured.tokens}
        job.metrics.write("eval", step, values | {"elapsed_seconds": time.monotonic() - started})
    return measured


def _write_summary(job: Job, progress: Progress, measured: Perplexity | None) -> None:
    """`measured` is None where a run has diverged before its end."""
    if dist.get_rank() > 0:
        return
    figures = {
        "validation_loss": measured.loss if measured else math.nan,
        "validation_perplexity": measured.token_perplexity if measured else math.nan,
        "validation_tokens": measured.tokens if measured else 0,
    }
    write_json(job.run.summary_file, dataclasses.asdict(progress) | finite_or_none(figures))
