"""Every kind of model that can be scored, opened through one function.

A further kind is one more `_open_…` here; whatever scores models only calls `token_losses`.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from megahedge.checkpoint.store import MANIFEST, complete_checkpoints
from megahedge.config.model import ModelConfig
from megahedge.evaluation.perplexity import TokenLosses
from megahedge.export.code_files import code_digest, folder_digest
from megahedge.export.source import StoredModel, find_tokenizer, teacher_place
from megahedge.export.to_hf import MODEL_TYPE, build_hf_model
from megahedge.models.families import FAMILIES
from megahedge.models.hf_weights import load_config, load_pretrained
from megahedge.models.hub import resolve_pretrained
from megahedge.models.language_model import LanguageModel
from megahedge.models.weight_files import few
from megahedge.parallel.sharding import load_parameters, named_specs
from megahedge.utils.errors import InputError, check_known
from megahedge.utils.files import read_json_object
from megahedge.utils.labels import IGNORE_INDEX
from megahedge.utils.logging import get_logger
from megahedge.utils.precision import TORCH_DTYPES

logger = get_logger(__name__)

DTYPES = ("fp32", "bf16")
IMPLEMENTATIONS = ("auto", "megahedge", "transformers")


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

    implementation: `transformers` scores with AutoModelForCausalLM, an exported student with the code in its folder; `auto` uses ours
    for exported students and every family that it knows.
    Raises InputError where there is no such model, or where any of its parameters would not come from the files.
    """
    check_known("implementation", implementation, IMPLEMENTATIONS)
    check_known("dtype", dtype, DTYPES)
    path = Path(name).expanduser()
    if _is_run(path):
        if implementation == "transformers":
            raise InputError(f"--implementation=transformers reads Hugging Face folders; {name} is a run: give its exported folder")
        return _open_run(path, TORCH_DTYPES[dtype], device)
    folder = _resolve_folder(name)
    exported = _model_type(folder) == MODEL_TYPE
    if implementation == "auto":
        implementation = "megahedge" if exported or _model_type(folder) in FAMILIES else "transformers"
    own = _open_exported if exported else _open_published
    opener = own if implementation == "megahedge" else _open_transformers
    return opener(folder, TORCH_DTYPES[dtype], device)


def open_hf_model(name: str | os.PathLike, dtype: str = "fp32", device: torch.device | str = "cpu") -> tuple[Any, Any | None]:
    """A model as transformers has it, with its generate() and cache, and the tokenizer that lies with it.

    Takes what `open_model` takes, and raises InputError as it does.
    """
    check_known("dtype", dtype, DTYPES)
    path = Path(name).expanduser()
    if _is_run(path):
        return build_hf_model(path, TORCH_DTYPES[dtype], device)
    folder = _resolve_folder(name)
    load = _load_exported if _model_type(folder) == MODEL_TYPE else _load_by_transformers
    model, _ = load(folder, TORCH_DTYPES[dtype], device)
    return model, find_tokenizer(folder)[0]


def teacher_of(name: str | os.PathLike) -> Path:
    """Folder of the teacher that a student, a run or an export, learnt from.

    Raises InputError where the student names none, or where it cannot be had.
    """
    path = Path(name).expanduser()
    if _is_run(path):
        stored = StoredModel.open(path)
        student, origin = stored.run, stored.record.get("origin", {})
    else:
        student = _resolve_folder(name)
        origin = read_json_object(student / "config.json")
    teacher, revision = origin.get("teacher"), origin.get("teacher_revision")
    if teacher is None:
        raise InputError(f"--model={name} does not say who its teacher was; give --teacher")
    try:
        return resolve_pretrained(teacher_place(teacher, revision, student), revision)
    except InputError as error:
        raise InputError(f"the teacher of --model={name}: {error}; give --teacher") from None


def _resolve_folder(name: str | os.PathLike) -> Path:
    folder = resolve_pretrained(name)
    if not (folder / "config.json").is_file():
        raise InputError(f"{name} is neither a run (run.json, checkpoints/) nor a Hugging Face folder (config.json)")
    return folder


def _model_type(folder: Path) -> str | None:
    return read_json_object(folder / "config.json").get("model_type")


def _is_run(path: Path) -> bool:
    """Whether it is a run folder, its folder of checkpoints, or one checkpoint."""
    return any((path / name).is_file() for name in ("run.json", MANIFEST)) or any(
        complete_checkpoints(root) for root in (path, path / "checkpoints")
    )


def _empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> LanguageModel:
    with torch.device(device):
        return LanguageModel(config).to(dtype).eval()


def _open_run(path: Path, dtype: torch.dtype, device: torch.device | str) -> OpenModel:
    stored = StoredModel.open(path)
    model = _empty_model(stored.config, dtype, device)
    load_parameters(model, stored.read, model.tensor_parallel)
    source = ModelSource(
        path=str(stored.checkpoint.path),
        kind=stored.stage,
        implementation="megahedge",
        step=stored.checkpoint.step,
        loaded=len(stored.names),
    )
    config = stored.config
    return OpenModel(model.token_losses, model, config.vocab_size, config.max_position_embeddings, source, *stored.find_tokenizer())


def _open_published(folder: Path, dtype: torch.dtype, device: torch.device | str) -> OpenModel:
    config = load_config(folder)
    model = _empty_model(config, dtype, device)
    load_pretrained(model, folder)
    loaded = sum(1 for _ in named_specs(model))
    source = ModelSource(path=str(folder), kind=config.family, implementation="megahedge", step=None, loaded=loaded)
    return OpenModel(model.token_losses, model, config.vocab_size, config.max_position_embeddings, source, *find_tokenizer(folder))


def _open_exported(folder: Path, dtype: torch.dtype, device: torch.device | str) -> OpenModel:
    return _wrapped("megahedge", folder, *_load_exported(folder, dtype, device))


def _open_transformers(folder: Path, dtype: torch.dtype, device: torch.device | str) -> OpenModel:
    return _wrapped("transformers", folder, *_load_by_transformers(folder, dtype, device))


def _load_exported(folder: Path, dtype: torch.dtype, device: torch.device | str) -> tuple[Any, int]:
    """A student's export by the class of this package: no code of the folder is run."""
    from megahedge.export.modeling_hedge_mamba import HedgeMambaForCausalLM

    theirs, ours = folder_digest(folder), code_digest()
    if theirs not in (None, ours):
        logger.warning("%s carries the code of another version (%s); what runs here is this package's (%s)", folder, theirs, ours)
    return _load(HedgeMambaForCausalLM, folder, dtype, device)


def _load_by_transformers(folder: Path, dtype: torch.dtype, device: torch.device | str) -> tuple[Any, int]:
    """By the code that transformers has for it or, for an export of ours alone, that the folder carries along."""
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, folder, dtype, device, trust_remote_code=_model_type(folder) == MODEL_TYPE)


def _load(model_class: type, folder: Path, dtype: torch.dtype, device: torch.device | str, **options) -> tuple[Any, int]:
    """A model of transformers, all of whose tensors came from the folder, and the number of tensors that it has no use for."""
    transformers.logging.disable_progress_bar()  # a line of noise for the small models, and no news for the large ones
    try:
        # tensors of another shape are refused below, by name
        model, info = model_class.from_pretrained(folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except Exception as error:  # a damaged file fails in whatever way its bytes lead to, in transformers or a library below it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"transformers cannot load {folder}: {reason}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(f"{folder} lacks {len(missing)} tensors that its config.json asks for: {few(missing)}")
    others = sorted(f"{name} is {list(found)}, not {list(wanted)}" for name, found, wanted in info["mismatched_keys"])
    if others:
        raise InputError(f"{folder} holds {len(others)} tensors in another shape than its config.json asks for: {few(others)}")
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        logger.warning("%s holds %d tensors that its model does not use: %s", folder, len(unexpected), few(unexpected))
    return model.to(device).eval(), len(unexpected)


def _wrapped(implementation: str, folder: Path, model: Any, unexpected: int) -> OpenModel:
    config = model.config.get_text_config()
    source = ModelSource(
        path=str(folder),
        kind=config.model_type,
        implementation=implementation,
        step=None,
        loaded=sum(1 for _ in model.parameters()),
        unexpected=unexpected,
    )

    def logits(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, use_cache=False).logits

    def token_losses(tokens: Tensor, labels: Tensor, boundaries: Tensor | None = None) -> Tensor:
        if boundaries is not None:
            raise InputError(
                f"--reset_at_documents: {folder} is scored by a class of transformers, which looks across documents; give a run, or a "
                "teacher of a family that megahedge knows"
            )
        losses = F.cross_entropy(logits(tokens).float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return losses.view_as(labels)

    max_seq_len = getattr(config, "max_position_embeddings", None)
    return OpenModel(token_losses, logits, config.vocab_size, max_seq_len, source, *find_tokenizer(folder))
