"""Pretraining: a softmax-attention language model from scratch, or one with weights trained on, to have a teacher of one's own."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megahedge.config.model import ModelConfig
from megahedge.config.options import PretrainOptions
from megahedge.data.blending import parse_data_path
from megahedge.data.meta import find_split, load_meta
from megahedge.data.tokenizer import load_tokenizer
from megahedge.models.hf_weights import TokenIds, load_config, load_config_file, load_pretrained, save_pretrained
from megahedge.models.hub import resolve_pretrained
from megahedge.models.language_model import LanguageModel
from megahedge.parallel.initialize import initialize_parameters
from megahedge.parallel.loss import vocab_parallel_cross_entropy
from megahedge.parallel.topology import TensorParallel
from megahedge.stages.base import Plan, Stage, plan_run, run_stage
from megahedge.training.distributed import check_environment, on_first_rank
from megahedge.training.engine import TrainingEngine
from megahedge.utils.errors import InputError
from megahedge.utils.files import fresh_folder
from megahedge.utils.logging import get_logger
from megahedge.utils.precision import TORCH_DTYPES

logger = get_logger(__name__)


class Pretrain(Stage):
    """All parameters train, with cross-entropy on the text."""

    name = "pretrain"

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel, options: PretrainOptions):
        super().__init__()
        self.student = LanguageModel(config, tensor_parallel, activation_checkpointing=options.activation_checkpointing)

    def start(self, plan: Plan) -> None:
        """The weights of --init_from, or fresh parameters, a function of the seed."""
        if plan.weights:
            load_pretrained(self.student, plan.weights)
        else:
            initialize_parameters(self.student, plan.options.seed, self.student.tensor_parallel)

    def loss(self, tokens: Tensor, labels: Tensor, boundaries: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean cross-entropy in nats per token."""
        logits = self.student(tokens, boundaries)
        return vocab_parallel_cross_entropy(logits, labels, self.student.config.vocab_size, self.student.tensor_parallel), {}


def pretrain(options: PretrainOptions) -> None:
    """Train a model and write it as a Hugging Face folder, `<output_dir>/hf`.  Raises InputError."""
    check_environment()
    if options.init_from is None:
        weights, config = None, _read_model_config(options.model_config)
    else:
        weights = resolve_pretrained(options.init_from)
        config = load_config(weights)
    tokenizer, source = _find_tokenizer(options)
    model_name = Path(options.model_config).stem if weights is None else Path(options.init_from).name
    plan = plan_run(options, config, f"runs/pretrain-{model_name}", tokenizer, source, weights=weights)
    outcome = run_stage(Pretrain, plan)
    if outcome is None:
        return
    stage, engine, progress = outcome
    if progress.finished(options.train_steps):
        _export(stage, engine, tokenizer, plan.run.path / "hf", TORCH_DTYPES[options.export_dtype])


def _read_model_config(path: str) -> ModelConfig:
    if not Path(path).is_file():
        raise InputError(f"--model_config={path} is not a file; give a GPT-NeoX config.json, such as tools/configs/neox-small.json")
    return load_config_file(path)


def _find_tokenizer(options: PretrainOptions):
    """The tokenizer to save with the model, and where it came from."""
    name, revision = options.tokenizer, None
    if name is None:
        prefix = parse_data_path(options.data_path)[0][1]
        find_split(prefix, "train")  # where there is no data at all, that is the thing to say
        meta = load_meta(prefix)
        if meta is None:
            raise InputError(f"--data_path {prefix} does not say which tokenizer made it; give --tokenizer")
        name, revision = meta.tokenizer_name, meta.options.get("tokenizer_revision")
    return load_tokenizer(name, revision), f"--tokenizer {name}" if options.tokenizer else f"the data's tokenizer {name}"


def _export(stage: Pretrain, engine: TrainingEngine, tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """Write the trained model for transformers, in place of what an earlier start may have written.  Collective; rank 0 writes."""
    tensors = ((name, engine.read_full(name)) for name in engine.parameters)
    error = None
    if dist.get_rank() == 0:
        try:
            _write_folder(tensors, stage.student.config, tokenizer, folder, dtype)
        except Exception as caught:
            error = caught
    for _ in tensors:  # the other ranks, and rank 0 after a failure, take part in the gathering
        pass
    on_first_rank(lambda: _raise(error), f"the model could not be written to {folder}")
    logger.info("model written to %s", folder)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _write_folder(tensors, config: ModelConfig, tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """Only when the new folder is whole does it take the old one's place."""
    with fresh_folder(folder) as new:
        save_pretrained(tensors, config, new, dtype, TokenIds(bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id))
        tokenizer.save_pretrained(new)
