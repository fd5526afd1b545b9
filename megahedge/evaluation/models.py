"""Every kind of model that can be scored, opened through one function.

A further kind (a student of another mixer, an exported model) is one more `_open_…` here; whatever scores models only calls `token_losses`.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megahedge.checkpoint.store import MANIFEST, Checkpoint, complete_checkpoints, open_checkpoint
from megahedge.config.model import ModelConfig
from megahedge.data.meta import tokenizer_digest
from megahedge.data.tokenizer import load_tokenizer
from megahedge.evaluation.perplexity import TokenLosses
from megahedge.models.families import FAMILIES
from megahedge.models.hf_weights import load_config, load_pretrained
from megahedge.models.hub import resolve_pretrained
from megahedge.models.language_model import LanguageModel
from megahedge.models.weight_files import few
from megahedge.parallel.sharding import load_parameters, named_specs
from megahedge.utils.errors import InputError
from megahedge.utils.files import read_json_object
from megahedge.utils.labels import IGNORE_INDEX
from megahedge.utils.logging import get_logger

logger = get_logger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
IMPLEMENTATIONS = ("auto", "megahedge", "transformers")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Where an opened model came from; goes into the report as it is."""

    path: str
    """Folder that the weights were read from."""
    kind: str
    """Stage of a run, or model_type of a Hugging Face folder."""
    implementation: str
    """Whose forward pass scores: megahedge or transformers."""
    step: int | None
    """Optimizer steps behind a checkpoint; None for a Hugging Face folder."""
    loaded: int
    """Tensors read."""
    missing: int = 0
    """Tensors that the model wants and the folder lacks: always 0, as a model with fresh weights is refused."""
    unexpected: int = 0
    """Tensors in the folder that the model has no use for."""


@dataclasses.dataclass(frozen=True)
class OpenModel:
    """A model ready to be scored."""

    token_losses: TokenLosses
    logits: Callable[[Tensor], Tensor]
    """From tokens [b, t] to [b, t, vocab_size]."""
    vocab_size: int
    max_seq_len: int | None
    """Longest sequence that it was made for; None where its config names none."""
    source: ModelSource
    tokenizer: Any | None
    """Hugging Face tokenizer, where one lies with the model."""
    tokenizer_digest: str | None
    """Identity of the tokenizer that the model was trained with, where it is known."""


def open_model(name: str | os.PathLike, implementation: str = "auto", dtype: str = "fp32", device: torch.device | str = "cpu") -> OpenModel:
    """Load a run folder, one of its checkpoints, a Hugging Face folder or a hub model.

    implementation: `transformers` scores with its own AutoModelForCausalLM; `auto` uses ours for every family that it knows.
    Raises InputError where there is no such model, or where any of its parameters would not come from the files.
    """
    for option, value, known in (("implementation", implementation, IMPLEMENTATIONS), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise InputError(f"--{option}={value} is not known; use one of {', '.join(known)}")
    path = Path(name).expanduser()
    if _is_run(path):
        if implementation == "transformers":
            raise InputError(f"--implementation=transformers reads Hugging Face folders; {name} is a run: give its exported folder")
        return _open_run(path, DTYPES[dtype], device)
    folder = resolve_pretrained(name)
    if not (folder / "config.json").is_file():
        raise InputError(f"--model={name} is neither a run (run.json, checkpoints/) nor a Hugging Face folder (config.json)")
    if implementation == "auto":
        model_type = read_json_object(folder / "config.json").get("model_type")
        implementation = "megahedge" if model_type in FAMILIES else "transformers"
    opener = _open_published if implementation == "megahedge" else _open_transformers
    return opener(folder, DTYPES[dtype], device)


def _is_run(path: Path) -> bool:
    """Whether it is a run folder, its folder of checkpoints, or one checkpoint."""
    return any((path / name).is_file() for name in ("run.json", MANIFEST)) or any(
        complete_checkpoints(root) for root in (path, path / "checkpoints")
    )


def _empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> LanguageModel:
    with torch.device(device):
        return LanguageModel(config).to(dtype).eval()


def _open_run(path: Path, dtype: torch.dtype, device: torch.device | str) -> OpenModel:
    checkpoint = open_checkpoint(path, groups=("parameters",))
    try:
        config = ModelConfig.from_record(checkpoint.record["model"])
    except (KeyError, TypeError) as error:
        raise InputError(
            f"checkpoint {checkpoint.path} was written by another version: its record has no model to build ({error})"
        ) from None
    model = _empty_model(config, dtype, device)
    _check_names(model, checkpoint)
    load_parameters(model, lambda name, index: checkpoint.read("parameters", name, index), model.tensor_parallel)
    run = checkpoint.path.parent.parent
    tokenizer, digest = _find_tokenizer_of_run(run, checkpoint.record)
    if (run / "run.json").is_file():
        digest = read_json_object(run / "run.json").get("data", {}).get("tokenizer_digest") or digest
    source = ModelSource(
        path=str(checkpoint.path),
        kind=checkpoint.record.get("stage", "unknown stage"),
        implementation="megahedge",
        step=checkpoint.step,
        loaded=len(checkpoint.names("parameters")),
    )
    return OpenModel(model.token_losses, model, config.vocab_size, config.max_position_embeddings, source, tokenizer, digest)


def _find_tokenizer_of_run(run: Path, record: dict) -> tuple[Any | None, str | None]:
    """The tokenizer that a pretrained model lies with, or that of the teacher behind a stage; two times None where neither is there."""
    if (run / "hf").is_dir():
        return _find_tokenizer(run / "hf")
    origin = record.get("origin", {})
    if origin.get("teacher") is None:
        return None, None
    try:
        tokenizer = load_tokenizer(origin["teacher"], origin["teacher_revision"])
    except InputError as error:
        logger.warning("the tokenizer of the run's teacher: %s", error)
        return None, None
    return tokenizer, tokenizer_digest(tokenizer)


def _check_names(model: LanguageModel, checkpoint: Checkpoint) -> None:
    """The checkpoint must hold the model's parameters, and nothing that the model would leave out."""
    wanted, there = [name for name, _ in named_specs(model)], checkpoint.names("parameters")
    missing = [name for name in wanted if name not in there]
    unexpected = [name for name in there if name not in wanted]
    if missing or unexpected:
        raise InputError(
            f"checkpoint {checkpoint.path} does not hold the {len(wanted)} tensors that its record describes: "
            f"{len(missing)} missing ({few(missing)}), {len(unexpected)} unexpected ({few(unexpected)})"
        )


def _open_published(folder: Path, dtype: torch.dtype, device: torch.device | str) -> OpenModel:
    config = load_config(folder)
    model = _empty_model(config, dtype, device)
    load_pretrained(model, folder)
    loaded = sum(1 for _ in named_specs(model))
    source = ModelSource(path=str(folder), kind=config.family, implementation="megahedge", step=None, loaded=loaded)
    return OpenModel(model.token_losses, model, config.vocab_size, config.max_position_embeddings, source, *_find_tokenizer(folder))


def _open_transformers(folder: Path, dtype: torch.dtype, device: torch.device | str) -> OpenModel:
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"transformers cannot load {folder}: {reason}") from None
    missing = sorted([*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])])
    if missing:
        raise InputError(f"{folder} lacks {len(missing)} tensors, or holds them in another shape: {few(missing)}")
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        logger.warning("%s holds %d tensors that its model does not use: %s", folder, len(unexpected), few(unexpected))
    model = model.to(device).eval()
    config = model.config.get_text_config()
    source = ModelSource(
        path=str(folder),
        kind=config.model_type,
        implementation="transformers",
        step=None,
        loaded=sum(1 for _ in model.parameters()),
        unexpected=len(unexpected),
    )

    def logits(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, use_cache=False).logits

    def token_losses(tokens: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits(tokens).float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return losses.view_as(labels)

    max_seq_len = getattr(config, "max_position_embeddings", None)
    return OpenModel(token_losses, logits, config.vocab_size, max_seq_len, source, *_find_tokenizer(folder))


def _find_tokenizer(folder: Path) -> tuple[Any | None, str | None]:
    """The folder's tokenizer and its digest; two times None where there is none."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None, None
    tokenizer = load_tokenizer(str(folder))
    return tokenizer, tokenizer_digest(tokenizer)
