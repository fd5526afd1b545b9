"""Stage 2: each mixer becomes a HedgeMamba, and everything but the embeddings is fine-tuned on text.

What it adds starts as identities, so that the student begins exactly where stage 1 ended; no step is taken before that is proven.
The naive baseline, `--mixer mamba`, alone has nothing to hand over: its mixers start afresh.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megahedge.checkpoint.store import MANIFEST, Checkpoint, StoredGroup, complete_checkpoints
from megahedge.config.mixer import MixerConfig
from megahedge.config.model import ModelConfig
from megahedge.config.options import Stage2Options
from megahedge.export.source import teacher_place
from megahedge.kernels import DenominatorStats
from megahedge.models.handover import MAX_PROBE_KL, Source, added_parameters, either_source, make_probe, probe_divergence
from megahedge.models.hf_weights import PretrainedWeights, weights_digest
from megahedge.models.language_model import LanguageModel
from megahedge.parallel.head_loss import Distillation
from megahedge.parallel.initialize import fresh_values
from megahedge.parallel.loss import masked_mean
from megahedge.parallel.sharding import load_parameters
from megahedge.parallel.topology import TensorParallel
from megahedge.stages.base import Plan, Stage, plan_run, run_stage
from megahedge.stages.stage1 import denominator_metrics, probe_tokens
from megahedge.stages.teacher import Teacher, check_data_exists
from megahedge.training.checkpointing import Extras
from megahedge.training.distributed import check_environment
from megahedge.utils.errors import InputError, RunError
from megahedge.utils.files import read_json_object
from megahedge.utils.labels import IGNORE_INDEX
from megahedge.utils.logging import get_logger

logger = get_logger(__name__)


class Stage2(Stage):
    """All but the embeddings train, with cross-entropy and, where asked for, the divergence from the teacher."""

    name = "stage2"

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel, options: Stage2Options):
        super().__init__()
        self.options = options
        self.student = LanguageModel(config, tensor_parallel, activation_checkpointing=options.activation_checkpointing)
        for embedding in (self.student.embedding, self.student.lm_head):
            embedding.requires_grad_(False)
        if options.lr_new is not None:
            added = added_parameters(config, "hedgehog")
            for name, parameter in self.student.named_parameters():
                parameter.lr_scale = options.lr_new / options.lr if name in added else 1.0
        self.teacher = self._build_teacher(config, tensor_parallel) if options.kd_alpha else None

    def _build_teacher(self, config: ModelConfig, tensor_parallel: TensorParallel) -> LanguageModel:
        """A frozen softmax model around the student's embeddings, which are the teacher's and stay so."""
        teacher = LanguageModel(config.with_mixer(MixerConfig()), tensor_parallel)
        teacher.embedding, teacher.lm_head = self.student.embedding, self.student.lm_head
        return teacher.requires_grad_(False)

    # ---- the start ------------------------------------------------------------------------------------------------------------

    @classmethod
    def origin(cls, plan: Plan) -> dict:
        """The teacher and the stage-1 checkpoint behind the run.  Raises InputError if one does not belong to the other."""
        options, weights = plan.options, weights_digest(plan.weights)
        before = _origin_of_resumed(options)
        teacher, revision = _teacher_name(options, plan.source.record.get("origin", {}) if plan.source else before)
        if before is not None:  # stage 1 may have gone on since, or be gone
            return before | {"weights": weights, "teacher": teacher, "teacher_revision": revision}
        if plan.source is not None:
            plan.source.verify(("parameters", "probe"))
            _check_teacher(plan, weights)
            _warn_of_unfinished(plan.source)
        return {
            "weights": weights,
            "teacher": teacher,
            "teacher_revision": revision,
            "init_from": options.init_from,
            "stage1_steps": plan.source.step if plan.source else 0,
            "handover_proven": options.hands_over,  # what is not proven takes no step, and has no record
        }

    def start(self, plan: Plan) -> None:
        """Stage 1's parameters and identities, proven to compute what stage 1 computed; or, around fresh mixers, the teacher's alone."""
        read = either_source(_source(plan), fresh_values(self.student, plan.options.seed))
        load_parameters(self.student, read, self.student.tensor_parallel)
        if not plan.options.hands_over:
            logger.info("mixers of kind %s start afresh: there is no hand-over to prove", plan.options.mixer)
            return
        _prove_handover(self.student, plan, read)
        if plan.options.decay_init and plan.options.decay != "none":
            self._set_rates(plan.options.decay_init)

    @torch.no_grad()
    def _set_rates(self, value: float) -> None:
        for block in self.student.blocks:
            if block.mixer.decay is not None:
                block.mixer.decay.rate.weight.fill_(value)
        logger.info("rates of the decay start at %g (--decay_init): the student no longer is what stage 1 has learnt", value)

    def load_teacher(self, plan: Plan) -> None:
        """The layers of the KL's teacher; its embeddings are the student's."""
        if self.teacher is not None:
            load_parameters(self.teacher, PretrainedWeights(plan.model, plan.weights).read, self.teacher.tensor_parallel)

    # ---- a step ---------------------------------------------------------------------------------------------------------------

    def loss(self, tokens: Tensor, labels: Tensor, boundaries: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """(1 − a) · cross-entropy + a · KL(teacher ‖ student), means over the tokens that are scored, in nats."""
        options, stats = self.options, DenominatorStats()
        hidden, distillation = self.student.hidden_states(tokens, boundaries, stats), None
        if self.teacher is not None:
            with torch.no_grad():
                distillation = Distillation(self.teacher.hidden_states(tokens, boundaries), options.kd_alpha, options.kd_temperature)
        scored = labels != IGNORE_INDEX
        loss, *parts = (None if x is None else masked_mean(x, scored) for x in self.student.head_losses(hidden, labels, distillation))
        metrics = denominator_metrics(self.student.config, stats) if stats.total else {}  # a mamba normalises nothing
        return loss, metrics if self.teacher is None else metrics | dict(zip(("cross_entropy", "kl"), parts, strict=True))

    def extras(self, plan: Plan) -> Extras:
        """The embeddings as the teacher's files hold them; stage 1 did not train them either."""
        return Extras(read_frozen=PretrainedWeights(plan.model, plan.weights).read)


def _source(plan: Plan) -> Source:
    """What the student starts from: stage 1's checkpoint, or the teacher where there was no stage 1."""
    return StoredGroup(plan.source, "parameters") if plan.source else PretrainedWeights(plan.model, plan.weights)


def _prove_handover(student: LanguageModel, plan: Plan, read: Callable[..., Tensor]) -> None:
    """Compare the student with the probe of stage 1, or with the Hedgehog model where there was no stage 1.

    Raises RunError where they are not the same function.
    """
    if plan.source is not None:
        stored = StoredGroup(plan.source, "probe")
        probe = {name: stored.read(name) for name in ("tokens", "logits")}
    else:
        before = plan.model.with_mixer(plan.model.mixer.as_kind("hedgehog"))
        probe = make_probe(before, probe_tokens(plan), read)
    divergence = probe_divergence(student, **probe)
    if math.isnan(divergence):
        raise RunError(f"what the run starts from gives logits that are not finite: its weights hold NaN or infinity ({plan.weights})")
    if not divergence <= MAX_PROBE_KL:
        raise RunError(
            f"the hand-over is not exact: the student differs from what it starts from by a KL of {divergence:.3g} nats a token on the "
            f"probe, where {MAX_PROBE_KL:g} is allowed; no step was taken"
        )
    for name, parameter in student.named_parameters():
        # a single rate off 0 shows too little on a short probe (KL 1e-9 and less)
        if getattr(parameter, "lower_bound", None) is not None and parameter.any():
            raise RunError(f"the hand-over is not exact: {name} starts at {parameter.max():.3g} instead of 0; no step was taken")
    logger.info("hand-over proven: KL %.2g nats a token on a probe of %d tokens", divergence, probe["tokens"].numel())


# ---- planning ---------------------------------------------------------------------------------------------------------------------


def stage2(options: Stage2Options) -> None:
    """Plan stage 2 and run it.  Raises InputError for what a user can mend, RunError where the hand-over is not exact."""
    run_stage(Stage2, plan_stage2(options))


def plan_stage2(options: Stage2Options) -> Plan:
    """Check everything that needs no weights."""
    check_environment()
    check_data_exists(options)
    resumed = _origin_of_resumed(options)
    source = _find_source(options) if options.init_from is not None and resumed is None else None
    if source is not None:
        teacher = _find_teacher(options, source.record.get("origin", {}), options.init_from)
    else:
        teacher = _find_teacher(options, resumed, options.output_dir)
    mixer = options.mixer_config(options.mixer)
    if source is not None:
        _check_source(options, source, teacher.config, mixer)
    output_dir = f"runs/stage2-{teacher.short_name}-{options.recipe}"
    return plan_run(
        options,
        teacher.config.with_mixer(mixer),
        output_dir,
        teacher.tokenizer,
        f"the teacher {teacher.name}",
        weights=teacher.folder,
        source=source,
    )


def _find_source(options: Stage2Options) -> Checkpoint:
    """The newest checkpoint of --init_from, or the one that it names; its files are verified later, by one rank for all."""
    path = Path(options.init_from)
    found = [path] if (path / MANIFEST).is_file() else complete_checkpoints(path / "checkpoints") or complete_checkpoints(path)
    if not found:
        raise InputError(f"--init_from={path} holds no complete checkpoint; give a run folder of scripts/stage1.py, or a checkpoint of it")
    return Checkpoint(found[0])


def _origin_of_resumed(options: Stage2Options) -> dict | None:
    """What the run that --resume goes on with recorded of its start; None where it has no checkpoint, and so starts anew."""
    if not options.resume or options.output_dir is None:
        return None
    found = complete_checkpoints(Path(options.output_dir) / "checkpoints")
    return Checkpoint(found[0]).record.get("origin") if found else None


def _warn_of_unfinished(source: Checkpoint) -> None:
    """A stage 1 that was stopped, or goes on, is a start like any other, but seldom the one that is meant."""
    run = source.path.parent.parent
    if not (run / "run.json").is_file():
        return
    summary = run / "summary.json"
    if not summary.is_file() or read_json_object(summary).get("step") != source.step:
        logger.warning("--init_from: stage 1 in %s has not ended; stage 2 starts from its step %d", run, source.step)


def _teacher_name(options: Stage2Options, origin: dict | None) -> tuple[str, str | None]:
    """Name and revision of --teacher, or of the one that the record of stage 1, or of the run itself, names."""
    if options.teacher is not None:
        return options.teacher, options.teacher_revision
    if options.teacher_revision is not None:
        raise InputError(f"--teacher_revision={options.teacher_revision} goes with --teacher; without that, stage 1's record names both")
    if not origin or origin.get("teacher") is None:
        raise InputError(f"--init_from={options.init_from} names no teacher: it is no run of scripts/stage1.py")
    return origin["teacher"], origin["teacher_revision"]


def _find_teacher(options: Stage2Options, origin: dict | None, run: str | None) -> Teacher:
    """Look it up, or download it.  A relative folder that the record of `run` names is looked for where that run may have been started."""
    name, revision = _teacher_name(options, origin)
    if options.teacher is None:
        name = teacher_place(name, revision, Path(run))
    try:
        return Teacher.find(name, revision)
    except InputError as error:
        if options.teacher is not None:
            raise
        raise InputError(f"the teacher of --init_from={options.init_from}: {error}; if it has moved, give --teacher") from None


def _check_source(options: Stage2Options, source: Checkpoint, teacher: ModelConfig, mixer: MixerConfig) -> None:
    """Refuse a checkpoint of another stage, length, family, shape or feature map."""
    where = f"--init_from={options.init_from}"
    if source.record.get("stage") != "stage1":
        raise InputError(f"{where} is a checkpoint of {source.record.get('stage')}; stage 2 starts from one of stage 1")
    if options.stage1_steps not in (None, source.step):
        raise InputError(f"{where} has {source.step} steps of stage 1 behind it, not --stage1_steps={options.stage1_steps}")
    before = ModelConfig.from_record(source.record["model"])
    if before.with_mixer(MixerConfig()) != teacher:
        raise InputError(f"{where} is a model of another family or shape than the teacher: {before} against {teacher}")
    asked, learnt = mixer.feature_map(), before.mixer.feature_map()
    differing = [f"--{name}={asked[name]} (stage 1: {learnt[name]})" for name in asked if asked[name] != learnt[name]]
    if differing:
        raise InputError(f"{where} has learnt another feature map: {', '.join(differing)}; use stage 1's --recipe and options")


def _check_teacher(plan: Plan, weights: str) -> None:
    before = plan.source.record["origin"]["weights"]
    if before != weights:
        raise InputError(
            f"--init_from={plan.options.init_from} has learnt from a teacher whose weights have digest {before[:12]}; those in "
            f"{plan.weights} have {weights[:12]}; give that run's teacher as --teacher"
        )
