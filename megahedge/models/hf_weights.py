"""Hugging Face folders, in and out: each rank reads its slices; what is written loads in transformers."""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megahedge.config.mixer import MixerConfig
from megahedge.config.model import ModelConfig
from megahedge.models.families import FAMILIES, family_of
from megahedge.models.hub import resolve_pretrained
from megahedge.models.language_model import LanguageModel
from megahedge.models.weight_files import CheckpointReader, few
from megahedge.parallel.sharding import Index, load_parameters, named_specs
from megahedge.utils.errors import InputError
from megahedge.utils.files import apply_umask, fsync_path, os_errors_told, read_json_object, run_hint, sha256_file, write_json
from megahedge.utils.logging import get_logger

__all__ = [
    "CheckpointReader",
    "PretrainedWeights",
    "TokenIds",
    "from_pretrained",
    "load_config",
    "load_config_file",
    "load_pretrained",
    "resolve_pretrained",
    "save_pretrained",
    "weights_digest",
]

logger = get_logger(__name__)

MAX_FILE_BYTES = 5 * 10**9
"""Largest weight file written; the hub's habit."""
SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load_config(folder: str | os.PathLike) -> ModelConfig:
    """Our config of a Hugging Face folder.  Raises InputError if config.json is missing, damaged or of an unsupported model."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} holds no config.json; {run_hint(folder) or 'a model is a folder with config.json and weights'}")
    return load_config_file(path)


def load_config_file(path: str | os.PathLike) -> ModelConfig:
    """Our config of one Hugging Face config.json, whatever its name.  Raises InputError if it is damaged or not supported."""
    hf_config = read_json_object(Path(path))
    try:
        return family_of(hf_config).model_config(hf_config)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


class PretrainedWeights:
    """The tensors of a Hugging Face folder under our names.

    Raises InputError unless the folder holds each parameter of its config's softmax model in its shape, and nothing that would be
    dropped.
    """

    def __init__(self, config: ModelConfig, folder: str | os.PathLike):
        self.folder = folder
        self._reader = CheckpointReader(folder)
        self._published = _match(config, self._reader)

    def __contains__(self, name: str) -> bool:
        return name in self._published

    def __len__(self) -> int:
        return len(self._published)

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """A tensor, or a piece of it, in the dtype of the file."""
        piece = self._reader.read(self._published[name], index)
        if piece.dtype not in SUPPORTED_DTYPES:
            found = f"{self._published[name]} is {piece.dtype}"
            raise InputError(f"{self.folder}: {found}; fp16, bf16 or fp32 weights are wanted, not quantised ones")
        return piece


def load_pretrained(model: LanguageModel, folder: str | os.PathLike) -> None:
    """Copy the folder's weights into a softmax model, each rank its own slices, in the parameters' dtype.

    Raises InputError unless the folder holds each parameter in its shape and nothing that the model would drop.
    """
    weights = PretrainedWeights(model.config, folder)
    load_parameters(model, weights.read, model.tensor_parallel)
    logger.info("%s: %d tensors loaded, 0 missing, 0 unexpected", folder, len(weights))


def _match(config: ModelConfig, reader: CheckpointReader) -> dict[str, str]:
    """Published name, as the folder spells it, of each parameter.  Raises InputError unless the two sets and all shapes agree."""
    family = FAMILIES[config.family]
    there = {family.canonical_name(name): name for name in reader.names if not family.ignorable(name)}
    if config.tie_word_embeddings:
        there.pop(family.hf_name("lm_head.weight"), None)  # .bin files repeat the tied matrix
    with torch.device("meta"):
        specs = list(named_specs(LanguageModel(config.with_mixer(MixerConfig()))))
    wanted = {family.hf_name(name): (name, spec.full_shape) for name, spec in specs}
    problems = {
        "missing": [name for name in wanted if name not in there],
        "unexpected": [name for name in there if name not in wanted],
        "of another shape": _shape_differences(reader, there, wanted),
    }
    if any(problems.values()):
        summary = "; ".join(f"{len(names)} {problem}" + (f" ({few(names)})" if names else "") for problem, names in problems.items())
        raise InputError(f"{reader.folder} does not hold the {len(wanted)} tensors that its config.json describes: {summary}")
    return {ours: there[name] for name, (ours, _) in wanted.items()}


def _shape_differences(reader: CheckpointReader, there: dict[str, str], wanted: dict[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    differences = []
    for name, (_, expected) in wanted.items():
        if name in there and reader.shape(there[name]) != expected:
            differences.append(f"{name} is {list(reader.shape(there[name]))}, not {list(expected)}")
    return differences


def from_pretrained(
    name_or_folder: str | os.PathLike, revision: str | None = None, dtype: torch.dtype = torch.float32, **options
) -> LanguageModel:
    """The model of a folder or hub name with its weights, on the CPU; `options` go to LanguageModel."""
    folder = resolve_pretrained(name_or_folder, revision)
    model = LanguageModel(load_config(folder), **options).to(dtype)
    load_pretrained(model, folder)
    return model


def weights_digest(folder: str | os.PathLike) -> str:
    """SHA-256 over names, sizes and SHA-256 of the weight files that would be loaded: tells one model from another."""
    digest = hashlib.sha256()
    for path in CheckpointReader(folder).files:
        digest.update(f"{path.name} {path.stat().st_size} {sha256_file(path)}\n".encode())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """Special tokens that config.json and generation_config.json name; None where the tokenizer has none."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None


def save_pretrained(
    tensors: Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    folder: str | os.PathLike,
    dtype: torch.dtype,
    token_ids: TokenIds = TokenIds(),
    max_file_bytes: int = MAX_FILE_BYTES,
    hf_config: dict | None = None,
) -> None:
    """Write a folder that transformers loads: config.json, generation_config.json and safetensors of `dtype`.

    tensors: our names and FULL tensors, each parameter once, in any order; taken one at a time, so a generator may gather them.
    hf_config: what config.json says in place of the family's own, for a model that is not the family's.
    config.json comes last: a folder without it is an unfinished one.
    Raises InputError if the folder holds weights already, ValueError if the tensors are not those of the config.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        raise InputError(f"{folder} holds weights already; give a new folder or remove them")
    family = FAMILIES[config.family]
    renamed = ((family.hf_name(name), tensor) for name, tensor in _checked(tensors, config))
    _write_weights(renamed, folder, dtype, max_file_bytes)
    ids = {f"{word}_token_id": value for word, value in dataclasses.asdict(token_ids).items()}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    write_json(folder / "config.json", {**(hf_config or family.hf_config(config)), **ids, "dtype": str(dtype).removeprefix("torch.")})


def _checked(tensors: Iterable[tuple[str, Tensor]], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The same tensors; raises ValueError at the first that is not of the config, or at the end if any was left out."""
    with torch.device("meta"):
        shapes = {name: spec.full_shape for name, spec in named_specs(LanguageModel(config))}
    for name, tensor in tensors:
        expected = shapes.pop(name, None)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"parameter {name} of shape {tuple(tensor.shape)} where {expected} is expected")
        yield name, tensor
    if shapes:
        raise ValueError(f"parameters not given: {few(list(shapes))}")


def _write_weights(tensors: Iterator[tuple[str, Tensor]], folder: Path, dtype: torch.dtype, max_file_bytes: int) -> None:
    """One model.safetensors, or numbered ones with an index where they would be larger than `max_file_bytes`."""
    parts: list[list[str]] = []
    total_bytes = 0
    for part in _batches(tensors, dtype, max_file_bytes):
        path = folder / _part_name(len(parts))
        with os_errors_told(path):
            save_file(part, path, metadata={"format": "pt"})
        apply_umask(path)
        fsync_path(path)
        parts.append(list(part))
        total_bytes += sum(tensor.nbytes for tensor in part.values())
    if len(parts) == 1:
        (folder / _part_name(0)).rename(folder / "model.safetensors")
        return
    file_of = {}
    for number, names in enumerate(parts):
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / _part_name(number)).rename(folder / file)
        file_of.update(dict.fromkeys(names, file))
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total_bytes}, "weight_map": file_of})


def _part_name(number: int) -> str:
    """Name while the number of files is not known; no reader takes it for weights."""
    return f"model-{number + 1:05d}.safetensors.part"


def _batches(tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, max_file_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in `dtype` on the CPU, as many at a time as fit into one file (one at least)."""
    batch: dict[str, Tensor] = {}
    for name, tensor in tensors:
        tensor = tensor.detach().to("cpu", dtype).contiguous()
        if batch and sum(held.nbytes for held in batch.values()) + tensor.nbytes > max_file_bytes:
            yield batch
            batch = {}
        batch[name] = tensor
    yield batch
