"""Stage 1: learn Hedgehog feature maps so that linear attention mimics the teacher's softmax attention.

One module tree is teacher and student: all parameters but the feature maps are the teacher's, frozen, and used by both.
"""

import functools

import torch
from torch import Tensor

from megahedge.config.model import ModelConfig
from megahedge.config.options import Stage1Options
from megahedge.distill.alignment import layer_losses
from megahedge.kernels import DenominatorStats
from megahedge.models.handover import PROBE_SHAPE, added_parameters, either_source, make_probe
from megahedge.models.hf_weights import PretrainedWeights
from megahedge.models.language_model import LanguageModel
from megahedge.parallel.initialize import fresh_values
from megahedge.parallel.sharding import load_parameters
from megahedge.parallel.topology import TensorParallel
from megahedge.stages.base import Plan, Stage, plan_run, run_stage
from megahedge.stages.teacher import Teacher, check_data_exists
from megahedge.training.checkpointing import Extras
from megahedge.training.distributed import check_environment


class Stage1(Stage):
    """The feature maps train, with a loss between student and teacher in every layer."""

    name = "stage1"

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel, options: Stage1Options):
        super().__init__()
        self.options = options
        self.student = LanguageModel(config, tensor_parallel, activation_checkpointing=options.activation_checkpointing)
        learnt = added_parameters(config, "softmax")
        for name, parameter in self.student.named_parameters():
            parameter.requires_grad_(name in learnt)

    @classmethod
    def origin(cls, plan: Plan) -> dict:
        """The teacher, by digest and by name."""
        options = plan.options
        return super().origin(plan) | {"teacher": options.teacher, "teacher_revision": options.teacher_revision}

    def start(self, plan: Plan) -> None:
        """The teacher's weights, and feature maps that start as identities."""
        read = either_source(PretrainedWeights(plan.model, plan.weights), fresh_values(self.student, plan.options.seed))
        load_parameters(self.student, read, self.student.tensor_parallel)

    def loss(self, tokens: Tensor, labels: Tensor, boundaries: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over layers of the loss between student and teacher, and each layer's."""
        options, stats = self.options, DenominatorStats()
        matching = (options.match_inputs, options.match_targets, options.match_loss)
        losses = layer_losses(self.student, tokens, *matching, stats, boundaries)
        metrics = {f"loss_layer_{index:02d}": loss for index, loss in enumerate(losses.detach())}
        return losses.mean(), metrics | denominator_metrics(self.student.config, stats)

    def extras(self, plan: Plan) -> Extras:
        """The teacher's weights as its files hold them, and the probe that stage 2 compares itself with."""
        tokens = probe_tokens(plan)
        return Extras(PretrainedWeights(plan.model, plan.weights).read, functools.partial(make_probe, plan.model, tokens))


def denominator_metrics(config: ModelConfig, stats: DenominatorStats) -> dict[str, Tensor]:
    """Shares of the normalisers that were too small and of those below 0; nothing for features that are positive."""
    if config.mixer.rope == "before":
        return {}
    total = max(1, stats.total)
    counts = {"normalizer_clamped": stats.clamped, "normalizer_negative": stats.negative}
    return {name: torch.as_tensor(count).float() / total for name, count in counts.items()}


def probe_tokens(plan: Plan) -> Tensor:
    """A few sequences [b, t] of the validation split."""
    batch = next(iter(plan.validation.micro_batches(PROBE_SHAPE[0])))
    return batch.tokens[:, : PROBE_SHAPE[1]].clone()


def stage1(options: Stage1Options) -> None:
    """Plan stage 1 and run it.  Raises InputError for what a user can mend."""
    run_stage(Stage1, plan_stage1(options))


def plan_stage1(options: Stage1Options) -> Plan:
    """Check everything that needs no weights."""
    check_environment()
    check_data_exists(options)
    teacher = Teacher.find(options.teacher, options.teacher_revision)
    model = teacher.config.with_mixer(options.mixer_config("hedgehog"))
    output_dir = f"runs/stage1-{teacher.short_name}-{options.recipe}"
    return plan_run(options, model, output_dir, teacher.tokenizer, f"the teacher {teacher.name}", weights=teacher.folder)
