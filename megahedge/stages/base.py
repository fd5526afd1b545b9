"""What a stage is, and the one way in which every stage runs."""

import abc
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from megahedge.checkpoint.store import Checkpoint
from megahedge.config.model import ModelConfig
from megahedge.config.options import BatchPlan, DataOptions, TrainOptions, plan_batches
from megahedge.config.published import known_gpu
from megahedge.data.blending import parse_data_path
from megahedge.data.index_cache import ArrayCache, check_ids
from megahedge.data.indexed_dataset import IndexedDataset
from megahedge.data.loader import BatchLoader, TrainingData, ValidationData
from megahedge.data.meta import check_documents, check_tokenizer, dataset_digest, eod_density, find_split, load_meta, tokenizer_digest
from megahedge.evaluation.perplexity import Perplexity, measure_perplexity
from megahedge.models.hf_weights import PretrainedWeights, weights_digest
from megahedge.models.language_model import LanguageModel
from megahedge.parallel.sharding import full_numel
from megahedge.parallel.topology import TensorParallel, Topology
from megahedge.training.checkpointing import (
    Extras,
    Progress,
    checkpoint_bytes,
    find_checkpoint,
    load_student,
    missing_room,
    restore_optimizer,
)
from megahedge.training.distributed import check_device, init_distributed, on_first_rank, tell_of_lost_ranks
from megahedge.training.ds_config import load_ds_config, merge_ds_config, zero_stage
from megahedge.training.engine import TrainingEngine
from megahedge.training.loop import Job, train
from megahedge.training.metrics import MetricsLog, check_wandb, has_evaluation
from megahedge.training.run_folder import SECONDS_FOR_PREDECESSOR, RunFolder
from megahedge.training.signals import StopSignal
from megahedge.training.watch import SilenceWatch
from megahedge.utils.errors import InputError
from megahedge.utils.launcher import global_rank, launcher_number
from megahedge.utils.logging import get_logger
from megahedge.utils.units import format_count
from megahedge.utils.words import divisors, either

logger = get_logger(__name__)


class Stage(nn.Module, abc.ABC):
    """A module that DeepSpeed wraps: it holds the student and whatever its loss needs.

    Built on the meta device for a plan, on the training device for a run.  Parameters that do not train have requires_grad False.
    """

    name: str
    student: LanguageModel

    @abc.abstractmethod
    def start(self, plan: "Plan") -> None:
        """Give every parameter its starting value, in fp32, when there is no checkpoint to go on from."""

    def load_teacher(self, plan: "Plan") -> None:
        """Fill what the module holds besides the student; called at every start."""

    @classmethod
    def origin(cls, plan: "Plan") -> dict:
        """What the run's record says of where the first parameters come from; asked on rank 0.  Raises InputError if it does not fit."""
        return {"weights": weights_digest(plan.weights) if plan.weights else None}

    def extras(self, plan: "Plan") -> Extras:
        """What a checkpoint holds besides the parameters that train."""
        return Extras()

    @abc.abstractmethod
    def loss(self, tokens: Tensor, labels: Tensor, boundaries: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Training loss, a scalar, and scalars to log, from tokens and labels [b, t].

        boundaries [b, t] bool, true where a document begins that sees nothing of what is before.
        """

    def token_losses(self, tokens: Tensor, labels: Tensor, boundaries: Tensor | None = None) -> Tensor:
        """Cross-entropy in nats of each label, [b, t]; what validation measures in every stage."""
        return self.student.token_losses(tokens, labels, boundaries)

    def forward(self, tokens: Tensor, labels: Tensor, boundaries: Tensor | None = None):
        """The loss in training mode, the tokens' losses in evaluation mode: DeepSpeed wants one way in."""
        measure = self.loss if self.training else self.token_losses
        return measure(tokens, labels, boundaries)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run that has passed every check that needs neither the model's weights nor other processes."""

    options: TrainOptions
    run: RunFolder
    model: ModelConfig
    batches: BatchPlan
    ds_config: dict
    data: TrainingData
    validation: ValidationData
    tokenizer_digest: str
    """Identity of the model's tokenizer, with which all data that says so was made."""
    tokenizer_source: str
    """Where it was found."""
    weights: Path | None = None
    """Hugging Face folder of the model that the run starts from, or learns from."""
    source: Checkpoint | None = None
    """Checkpoint of the stage before, from which the run starts."""
    eod_id: int | None = None
    """The tokenizer's token that ends a document, if it has one."""


def plan_run(
    options: TrainOptions,
    model: ModelConfig,
    default_output_dir: str,
    tokenizer,
    tokenizer_source: str,
    *,
    weights: Path | None = None,
    source: Checkpoint | None = None,
) -> Plan:
    """Check options, data, tokenizer, sizes and the run folder.

    tokenizer: that of the model; tokenizer_source: where it came from, for messages; weights, source: see Plan.
    Raises InputError.  Nothing is written but, beside large data, its sample order.
    """
    check_wandb(options.wandb_project)
    run = RunFolder(options.output_dir or default_output_dir)
    run.check(options)
    if model.num_heads % options.tp_size:
        fitting = either(divisors(model.num_heads))
        raise InputError(f"--tp_size={options.tp_size} does not divide num_heads={model.num_heads}; use {fitting}")
    if options.seq_len > model.max_position_embeddings:
        raise InputError(f"--seq_len={options.seq_len} is longer than the model's max_position_embeddings={model.max_position_embeddings}")
    dp_size = launcher_number("WORLD_SIZE", 1) // options.tp_size
    batches = plan_batches(options, max(1, dp_size))
    ds_config = merge_ds_config(load_ds_config(options.ds_config), options, batches)
    digest = _check_data(options, model, tokenizer, tokenizer_source)
    mark, mmap = options.reset_at_documents, options.mmap
    validation = ValidationData(
        find_validation(options), options.seq_len, options.eval_tokens, model.vocab_size, mark_documents=mark, mmap=mmap
    )
    data = TrainingData(options.data_path, options.seq_len, options.seed, options.index_cache_dir, mmap=mmap)
    if options.reset_at_documents:
        check_documents(validation.dataset, training=False)
        for index in data.indices:
            check_documents(index.dataset)
    if weights is not None:
        PretrainedWeights(model, weights)  # names and shapes, from the files' headers
    return Plan(
        options, run, model, batches, ds_config, data, validation, digest, tokenizer_source, weights, source, tokenizer.eos_token_id
    )


def _check_foreign_ids(plan: Plan) -> None:
    """Look at every token of pairs that no meta.json vouches for."""
    caches = [(index.dataset, index.cache) for index in plan.data.indices]
    caches.append((plan.validation.dataset, ArrayCache(plan.validation.dataset, plan.options.index_cache_dir, mmap=plan.options.mmap)))
    for dataset, cache in caches:
        if load_meta(dataset.prefix) is None:
            check_ids(dataset, plan.model.vocab_size, cache)


def find_validation(options: DataOptions) -> str:
    """Prefix of the pair that evaluations score.  Raises InputError where there is none."""
    if options.val_data_path is not None:
        return find_split(options.val_data_path, "val")
    try:
        return find_split(parse_data_path(options.data_path)[0][1], "val", allow_bare=False)
    except InputError as error:
        raise InputError(f"{error}, or give --val_data_path") from None


def _check_data(options: TrainOptions, model: ModelConfig, tokenizer, tokenizer_source: str) -> str:
    """Every corpus must have been made with this tokenizer, and its ids must fit the model's vocabulary; returns its digest.

    Data of other programs has no meta to ask; its ids are looked at when the run starts.
    """
    check_vocabulary(model, tokenizer, tokenizer_source)
    digest = tokenizer_digest(tokenizer)
    for corpus in _corpora(options):
        if (meta := load_meta(corpus)) is not None:
            check_tokenizer(meta, digest, tokenizer_source, tokenizer, f"the dataset {corpus}")
    return digest


def check_vocabulary(model: ModelConfig, tokenizer, tokenizer_source: str) -> None:
    """Raise InputError where a token of the tokenizer has no embedding."""
    largest_id = max(tokenizer.get_vocab().values())
    if largest_id >= model.vocab_size:
        raise InputError(f"{tokenizer_source} has token ids up to {largest_id}; the model has vocab_size={model.vocab_size}")


def _corpora(options: TrainOptions) -> list[str]:
    """Prefixes of all data of a run."""
    return [prefix for _, prefix in parse_data_path(options.data_path)] + ([options.val_data_path] if options.val_data_path else [])


def run_stage(stage_type: type[Stage], plan: Plan) -> tuple[Stage, TrainingEngine, Progress] | None:
    """Print the header, then build or resume, train, evaluate and save.

    Returns the stage, its engine and where the run stands, or None after --dry_run.
    """
    options = plan.options
    if options.dry_run:
        with torch.device("meta"):
            stage = stage_type(plan.model, TensorParallel(None, 0, options.tp_size), options)
        print_header(stage.name, plan, stage)
        _check_foreign_ids(plan)
        return None
    check_device()
    topology = init_distributed(options.tp_size)
    with tell_of_lost_ranks(), SilenceWatch(), StopSignal() as stop, contextlib.ExitStack() as held:
        on_first_rank(lambda: held.enter_context(_hold_folder(plan)), f"--output_dir={plan.run.path}")
        return _run(stage_type, plan, topology, stop)


@contextlib.contextmanager
def _hold_folder(plan: Plan) -> Iterator[None]:
    """Keep other jobs out of the run's folder, and look again at what it holds, which may have changed until then."""
    with plan.run.locked(SECONDS_FOR_PREDECESSOR if plan.options.resume else 0):
        plan.run.check(plan.options)
        yield


def _run(stage_type: type[Stage], plan: Plan, topology: Topology, stop: StopSignal) -> tuple[Stage, TrainingEngine, Progress]:
    options = plan.options
    on_first_rank(lambda: _check_foreign_ids(plan), "the data could not be read")
    record = on_first_rank(lambda: _record(stage_type, plan), "the model and data could not be digested")
    stage, checkpoint = _build(stage_type, plan, topology, record)
    print_header(stage.name, plan, stage)
    progress = _find_progress(plan, checkpoint)
    facts = {**record, "topology": _topology_record(plan, topology), "resumed_at_step": progress.step}
    on_first_rank(lambda: plan.run.write_record(stage.name, options, facts), f"--output_dir={plan.run.path}")
    on_first_rank(lambda: _check_room(plan, stage), f"--output_dir={plan.run.path}")
    engine = TrainingEngine(stage, stage.student, options, plan.batches, topology)
    if checkpoint:
        restore_optimizer(engine, checkpoint, progress)
        logger.info("resumed from %s: step %d, sample %d", checkpoint.path, progress.step, progress.samples)
    loader = BatchLoader(
        plan.data,
        global_batch_size=options.global_batch_size,
        micro_batch_size=plan.batches.micro_batch_size,
        dp_rank=topology.dp_rank,
        dp_size=topology.dp_size,
        vocab_size=plan.model.vocab_size,
        mark_documents=options.reset_at_documents,
    )

    def evaluate() -> Perplexity:
        batches = plan.validation.micro_batches(plan.batches.micro_batch_size, topology.dp_rank, topology.dp_size)
        with engine.evaluating() as module:
            return measure_perplexity(module, batches, engine.device, topology.dp_group)

    with contextlib.ExitStack() as opened:
        metrics = []
        on_first_rank(lambda: metrics.append(opened.enter_context(_open_metrics(plan, progress))), f"--output_dir={plan.run.path}")
        log = metrics[0] if metrics else None
        peak = _peak_tflops(options, engine.device)
        job = Job(options, engine, stage.student, loader, evaluate, plan.run, log, record, peak, stage.extras(plan), stop)
        progress = train(job, progress)
    return stage, engine, progress


def _check_room(plan: Plan, stage: Stage) -> None:
    """Warn where the disk has no room for the checkpoints to come."""
    shortage = missing_room(plan.run.checkpoints, checkpoint_bytes(stage.student), plan.options)
    if shortage:
        logger.warning("%s", shortage)


def _peak_tflops(options: TrainOptions, device: torch.device) -> float | None:
    """What a rank's device can do: as the user says, else by its data sheet."""
    gpu = known_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return options.peak_tflops or (gpu and gpu.peak_tflops(options.dtype))


def _find_progress(plan: Plan, checkpoint: Checkpoint | None) -> Progress:
    """Where the run stands: the checkpoint is written before the evaluation of its step, which may have been made since."""
    if checkpoint is None:
        return Progress()
    progress = Progress(**checkpoint.record["progress"])
    made = on_first_rank(lambda: has_evaluation(plan.run.metrics_file, progress.step), f"--output_dir={plan.run.path}")
    return dataclasses.replace(progress, evaluation_due=progress.evaluation_due and not made)


def _build(stage_type: type[Stage], plan: Plan, topology: Topology, record: dict):
    """The stage on the training device with its parameters, and the checkpoint that they came from, if any."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    with device:
        stage = stage_type(plan.model, topology.tensor_parallel, plan.options)
    checkpoint = find_checkpoint(plan.run.checkpoints) if plan.options.resume else None
    if checkpoint:
        _check_same_run(checkpoint, record)
        load_student(stage.student, checkpoint)
    else:
        stage.start(plan)
        if plan.options.resume:
            logger.info("--resume: no checkpoint in %s yet; starting at step 0", plan.run.checkpoints)
    stage.load_teacher(plan)
    return stage, checkpoint


def _record(stage_type: type[Stage], plan: Plan) -> dict:
    """What a checkpoint and run.json say of a run: its mathematics apart from the options."""
    model = dataclasses.asdict(plan.model)
    return {"stage": stage_type.name, "model": model, "data": _data_record(plan), "origin": stage_type.origin(plan)}


def _check_same_run(checkpoint: Checkpoint, record: dict) -> None:
    """Refuse a checkpoint whose stage, model or data are not those that the options name now; they may lie elsewhere."""
    before = checkpoint.record | {"model": _with_newer_fields(checkpoint.record.get("model"))}
    for key, now in record.items():
        differing = _differences(_without_places(before.get(key)), _without_places(now), key)
        if differing:
            raise InputError(f"--resume from {checkpoint.path}: {'; '.join(differing)}; use these again, or a new --output_dir")


def _with_newer_fields(model: dict | None) -> dict | None:
    """A recorded model with the fields that have come since, which it had at their defaults; as it is where that makes no model."""
    try:
        return dataclasses.asdict(ModelConfig.from_record(model))
    except (KeyError, TypeError, InputError):
        return model


def _differences(before, now, name: str) -> list[str]:
    """Each value of two nested records that is not the same in both."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [text for key in before | now for text in _differences(before.get(key), now.get(key), f"{name}.{key}")]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [text for index, pair in enumerate(zip(before, now, strict=True)) for text in _differences(*pair, f"{name}.{index}")]
    return [] if before == now else [f"{name} was {before} and is {now} now"]


_PLACES = ("prefix", "tokenizer_name", "teacher", "teacher_revision", "init_from")


def _without_places(value):
    """A record with the names of files and folders left out."""
    if isinstance(value, dict):
        return {key: _without_places(item) for key, item in value.items() if key not in _PLACES}
    return [_without_places(item) for item in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _open_metrics(plan: Plan, progress: Progress) -> Iterator[MetricsLog]:
    metrics = MetricsLog(plan.run.metrics_file, progress.step, progress.evaluation_due)
    try:
        if plan.options.wandb_project:
            name = plan.options.run_name or plan.run.path.name
            metrics.start_wandb(plan.options.wandb_project, name, dataclasses.asdict(plan.options), plan.run.path / "wandb_id")
        yield metrics
    finally:
        metrics.close()


def _data_record(plan: Plan) -> dict:
    return {
        "train": [dataset_digest(index.dataset) for index in plan.data.indices],
        "weights": [weight for weight, _ in parse_data_path(plan.options.data_path)],
        "validation": dataset_digest(plan.validation.dataset),
        "tokenizer_digest": plan.tokenizer_digest,
        "tokenizer_name": plan.tokenizer_source,
    }


def _topology_record(plan: Plan, topology: Topology) -> dict:
    return {
        "tp_size": topology.tp_size,
        "dp_size": topology.dp_size,
        "zero_stage": zero_stage(plan.ds_config),
        "micro_batch_size": plan.batches.micro_batch_size,
        "device": _device_name(),
    }


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def print_header(name: str, plan: Plan, stage: Stage | None = None) -> None:
    """What is about to run, derived figures included, on rank 0; parameter counts where the stage's module is at hand."""
    if global_rank() != 0:  # the others would read the data to print nothing
        return
    options, model, batches = plan.options, plan.model, plan.batches
    all_tokens = options.train_steps * options.tokens_per_step
    rows = {
        "run": f"{name} in {plan.run.path}",
        "model": describe_model(model),
        "mixer": model.mixer.describe(),
        "data": "; ".join(describe_data(index.dataset, plan.eod_id) for index in plan.data.indices),
        "epochs": ", ".join(f"{count:.3g}" for count in plan.data.epochs(options.train_steps * options.global_batch_size)),
        "validation": f"{describe_data(plan.validation.dataset, plan.eod_id)}, {format_count(plan.validation.num_scored_tokens)} scored",
        "tokenizer": f"{plan.tokenizer_source} (digest {plan.tokenizer_digest[:12]})",
        "steps": f"{options.train_steps} of {options.global_batch_size} × {options.seq_len} tokens, {all_tokens} in all",
        "batch": f"micro {batches.micro_batch_size} × accumulation {batches.accumulation_steps} × dp {batches.dp_size}",
        "schedule": f"warm-up {round(options.warmup_fraction * options.train_steps)} steps, {_describe_rates(options, stage)}",
        "device": f"{launcher_number('WORLD_SIZE', 1)} × {_device_name()}",
        "engine": f"ZeRO {zero_stage(plan.ds_config)} ({Path(options.ds_config).name}), tp {options.tp_size}, {options.dtype}",
    }
    if plan.source is not None:
        rows["start"] = f"step {plan.source.step} of {plan.source.record.get('stage')} ({plan.source.path})"
    for label, text in rows.items():
        logger.info("%-11s %s", label, text)
    if stage is not None:
        _print_parameters(stage, options.print_trainable)


def describe_model(model: ModelConfig) -> str:
    """Family and sizes."""
    return (
        f"{model.family}, {model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads of {model.head_dim}, "
        f"vocabulary {model.vocab_size}"
    )


def describe_data(dataset: IndexedDataset, eod_id: int | None) -> str:
    """Place, counts, density of EOD where that is known, and digest."""
    counts = f"{format_count(dataset.num_tokens)} tokens, {format_count(dataset.num_documents)} documents"
    eod = "" if eod_id is None else f", EOD {eod_density(dataset, eod_id)}"
    return f"{dataset.prefix} ({counts}{eod}, digest {dataset.index_digest[:12]})"


def _describe_rates(options: TrainOptions, stage: Stage | None) -> str:
    """The peak and the end of the learning rate; of each rate where some parameters have one of their own."""
    parameters = () if stage is None else filter(lambda parameter: parameter.requires_grad, stage.parameters())
    peaks = sorted({options.lr} | {options.lr * getattr(parameter, "lr_scale", 1.0) for parameter in parameters})
    ends = (peak * options.min_lr_ratio for peak in peaks)
    return f"peak {' and '.join(f'{peak:g}' for peak in peaks)}, cosine to {' and '.join(f'{end:g}' for end in ends)}"


def _print_parameters(stage: Stage, each_trainable: bool) -> None:
    counts = {"trainable": 0, "frozen": 0, "of the teacher": 0}
    of_student = {id(parameter) for parameter in stage.student.parameters()}
    for parameter in stage.parameters():
        kind = "trainable" if parameter.requires_grad else "frozen" if id(parameter) in of_student else "of the teacher"
        counts[kind] += full_numel(parameter)
    text = ", ".join(f"{format_count(count)} {kind} ({count})" for kind, count in counts.items() if count or kind != "of the teacher")
    logger.info("%-11s %s", "parameters", text)
    for name, parameter in stage.named_parameters():
        if each_trainable and parameter.requires_grad:
            logger.info("  trainable %s %s", name, "×".join(map(str, parameter.shard_spec.full_shape)))
