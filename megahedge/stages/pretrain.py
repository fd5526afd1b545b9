"""Pretraining: a softmax-attention language model from scratch, to have a teacher where none can be downloaded."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megahedge.config.model import ModelConfig
from megahedge.config.options import PretrainOptions
from megahedge.data.blending import parse_data_path
from megahedge.data.meta import find_split, load_meta
from megahedge.data.tokenizer import load_tokenizer
from megahedge.models.families import family_of
from megahedge.models.hf_weights import TokenIds, save_pretrained
from megahedge.models.language_model import LanguageModel
from megahedge.parallel.initialize import initialize_parameters
from megahedge.parallel.topology import TensorParallel
from megahedge.stages.base import Stage, plan_run, run_stage
from megahedge.training.engine import TrainingEngine
from megahedge.utils.errors import InputError
from megahedge.utils.files import read_json_object
from megahedge.utils.logging import get_logger

logger = get_logger(__name__)

EXPORT_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Pretrain(Stage):
    """All parameters train, with cross-entropy on the text."""

    name = "pretrain"

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel, options: PretrainOptions):
        super().__init__()
        self.student = LanguageModel(config, tensor_parallel, activation_checkpointing=options.activation_checkpointing)

    def start(self, options: PretrainOptions) -> None:
        """Fresh parameters, a function of the seed."""
        initialize_parameters(self.student, options.seed, self.student.tensor_parallel)

    def loss(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean cross-entropy in nats per token."""
        return self.student.token_losses(tokens, labels).mean(), {}


def pretrain(options: PretrainOptions) -> None:
    """Train a model from scratch and write it as a Hugging Face folder, `<output_dir>/hf`.  Raises InputError."""
    config = _read_model_config(options.model_config)
    tokenizer, source = _find_tokenizer(options)
    plan = plan_run(options, config, f"runs/pretrain-{Path(options.model_config).stem}", tokenizer, source)
    outcome = run_stage(Pretrain, plan)
    if outcome is None:
        return
    stage, engine, progress = outcome
    if progress.step == options.train_steps:
        _export(stage, engine, tokenizer, plan.run.path / "hf", EXPORT_DTYPES[options.export_dtype])


def _read_model_config(path: str) -> ModelConfig:
    if not Path(path).is_file():
        raise InputError(f"--model_config={path} is not a file; give a GPT-NeoX config.json, such as tools/configs/neox-small.json")
    hf_config = read_json_object(Path(path))
    return family_of(hf_config).model_config(hf_config)


def _find_tokenizer(options: PretrainOptions):
    """The tokenizer to save with the model, and where it came from."""
    name = options.tokenizer
    if name is None:
        prefix = parse_data_path(options.data_path)[0][1]
        find_split(prefix, "train")  # where there is no data at all, that is the thing to say
        meta = load_meta(prefix)
        if meta is None:
            raise InputError(f"--data_path {prefix} does not say which tokenizer made it; give --tokenizer")
        name = meta.tokenizer_name
    return load_tokenizer(name), f"--tokenizer {name}"


def _export(stage: Pretrain, engine: TrainingEngine, tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """Write the trained model for transformers, in place of what an earlier start may have written.  Collective; rank 0 writes."""
    tensors = ((name, engine.read_full(name)) for name in engine.parameters)
    if dist.get_rank() > 0:
        for _ in tensors:  # take part in the gathering
            pass
        return
    ids = TokenIds(bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id)
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    for leftover in (unfinished, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    save_pretrained(tensors, stage.student.config, unfinished, dtype, ids)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
    logger.info("model written to %s", folder)
