"""From a checkpoint to a folder that transformers loads without this package, or to the same model in memory."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megahedge.config.mixer import MixerConfig
from megahedge.config.model import ModelConfig
from megahedge.data.meta import tokenizer_digest
from megahedge.data.tokenizer import load_tokenizer
from megahedge.export.code_files import code_files
from megahedge.export.model_card import model_card
from megahedge.export.source import StoredModel, entry
from megahedge.export.verify import Agreement, verify_folder
from megahedge.models.families import FAMILIES
from megahedge.models.hf_weights import TokenIds, save_pretrained
from megahedge.utils.cli import positional
from megahedge.utils.errors import InputError, check_known
from megahedge.utils.files import atomic_write, disk_errors_explained, file_lock, fresh_folder, os_errors_told, why_not_writable
from megahedge.utils.precision import TORCH_DTYPES

MODEL_TYPE, ARCHITECTURE = "hedge_mamba", "HedgeMambaForCausalLM"
FEATURE_MAP = "hedgehog_softmax"
"""Which of the maps that go by the name of Hedgehog ours is: see HedgeMambaConfig."""
AUTO_MAP = {
    "AutoConfig": "configuration_hedge_mamba.HedgeMambaConfig",
    "AutoModel": "modeling_hedge_mamba.HedgeMambaModel",
    "AutoModelForCausalLM": f"modeling_hedge_mamba.{ARCHITECTURE}",
}

EXPORT_SUFFIXES = (".json", ".safetensors", ".py", ".jinja", ".model")
EXPORT_FILES = ("README.md", "merges.txt", "vocab.txt", ".gitattributes")
"""What a folder holds that --overwrite may replace; `.gitattributes` is the hub's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """tools/convert_to_hf.py"""

    run: str = positional()
    """Run folder of either stage or of a pretrained teacher, or one of its checkpoints."""
    out: str = positional()
    """Folder to make."""
    dtype: str = "auto"
    """Precision of the weights: fp32, bf16, fp16, or auto (that of the run)."""
    tokenizer: str | None = None
    """Folder or hub name of the run's tokenizer, where its teacher is no longer where it was."""
    verify: bool = True
    """Load what was written with transformers and compare its logits with the trainer's before OUT gets its name."""
    overwrite: bool = False
    """Replace a Hugging Face folder that lies at OUT, if it holds nothing but files of the kinds that an export writes."""

    def __post_init__(self):
        check_known("dtype", self.dtype, ("auto", *TORCH_DTYPES))
        if not self.run.strip():
            raise InputError("RUN is empty; name a run folder, or one of its checkpoints")
        if not self.out.strip():
            raise InputError("OUT is empty; name the folder to make")


@dataclasses.dataclass(frozen=True)
class Export:
    """What was written."""

    folder: Path
    stored: StoredModel
    dtype: str
    agreement: Agreement | None
    """How the folder's model agrees with the trainer's; None where that was not asked for."""

    def __str__(self) -> str:
        source = f"{self.stored.stage}, step {self.stored.checkpoint.step}: {self.stored.config.mixer.describe()}"
        verified = f"verified: {self.agreement}" if self.agreement else "not verified (--no_verify)"
        return f"{self.folder}  {len(self.stored.names)} tensors, {self.dtype}; {source}\n{verified}"


def export(options: ExportOptions) -> Export:
    """Write the folder, whole and verified or not at all.

    Raises InputError for inputs that a user can mend, RunError where what was written does not compute what the trainer computes.
    """
    out = Path(os.path.expanduser(options.out))
    _check_place(out, options.overwrite)
    stored = _open_exportable(os.path.expanduser(options.run))
    tokenizer = _tokenizer(stored, options.tokenizer)
    dtype = _run_dtype(stored) if options.dtype == "auto" else options.dtype
    with disk_errors_explained(out), _folder_in_the_making(out, options.overwrite) as folder:
        _write(folder, stored, tokenizer, dtype)
        agreement = verify_folder(folder, stored, TORCH_DTYPES[dtype]) if options.verify else None
        with atomic_write(folder / "README.md", "w") as handle:
            handle.write(model_card(stored, Path(os.path.abspath(out)).name, dtype, agreement))
    return Export(out, stored, dtype, agreement)


def _open_exportable(path: str | os.PathLike) -> StoredModel:
    """A stored model of which there is a class of transformers.  Raises InputError for one of which there is none, or no model at all."""
    stored = StoredModel.open(path)
    if stored.config.mixer.kind == "mamba":
        raise InputError(
            f"{path} is the baseline with mixer=mamba, which exists for comparison: it is not exported and writes no text; score the run "
            "itself with scripts/evaluate.py --model"
        )
    return stored


def _tokenizer(stored: StoredModel, given: str | None) -> Any:
    """The run's, or the one that was given, which must be the same.  Raises InputError where there is none."""
    if given is None:
        tokenizer, recorded = stored.find_tokenizer()
        if tokenizer is None:
            raise InputError(f"the tokenizer of {stored.checkpoint.path} is not to be found where the run had it; give --tokenizer")
    else:
        tokenizer, recorded = load_tokenizer(given, option="tokenizer"), stored.tokenizer_digest
    digest = tokenizer_digest(tokenizer)
    if recorded not in (None, digest):
        raise InputError(
            f"the tokenizer {given or tokenizer.name_or_path} has digest {digest[:12]}; the run's had {recorded[:12]}: give that one "
            "as --tokenizer"
        )
    return tokenizer


def _run_dtype(stored: StoredModel) -> str:
    """The precision that the run computed in, or that a pretrained teacher is written in; fp32 where nothing says."""
    record = stored.run_record()
    dtype = entry(record, "options", "export_dtype") or entry(record, "options", "dtype") or "fp32"
    if dtype not in TORCH_DTYPES:
        raise InputError(f"{stored.run / 'run.json'} names a precision that is not known, {dtype!r}; give --dtype")
    return dtype


@contextlib.contextmanager
def _folder_in_the_making(out: Path, overwrite: bool) -> Iterator[Path]:
    """A fresh folder that takes the place of `out` if all goes well, and leaves what was there if not.  Raises InputError."""
    place = _behind_links(out)
    place.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(place.with_name(f".{place.name}.lock"), blocking=False, remove=True))
        except BlockingIOError:
            raise InputError(f"OUT={out} is being written by another process; wait for it, or name another folder") from None
        folder = held.enter_context(fresh_folder(place))
        _check_place(out, overwrite)  # again: another process may have been here, or a killed one have left the old folder aside
        yield folder


def _behind_links(out: Path) -> Path:
    """The folder that is made or replaced: a link stays where it is, and leads to the new one."""
    return Path(os.path.realpath(out))


def _check_place(out: Path, overwrite: bool) -> None:
    """Refuse a place where no folder can be made, or what is there is neither an empty folder nor, where that was asked for, a model."""
    place = _behind_links(out)
    if os.path.lexists(place) and not os.path.isdir(place):
        raise InputError(f"OUT={out} is a file; name a folder")
    if Path.cwd().is_relative_to(place):
        raise InputError(f"OUT={out} is the folder that this command runs in, which cannot be replaced under it; name another folder")
    if os.path.ismount(place):
        raise InputError(f"OUT={out} is where a disk is mounted, which cannot be replaced; name a folder in it")
    fault = why_not_writable(place.with_name(f".unfinished-{place.name}") / "config.json")
    if fault:
        raise InputError(f"OUT={out} cannot be written: {fault}; name another folder")
    entries = list(place.iterdir()) if place.exists() else []
    if not entries:
        return
    if not (place / "config.json").is_file() or not all(path.is_file() for path in entries):
        raise InputError(f"OUT={out} is neither empty nor a Hugging Face folder, and is not replaced; name another folder")
    if not overwrite:
        raise InputError(f"OUT={out} holds a model already; name another folder, or give --overwrite to replace it")
    foreign = sorted(path.name for path in entries if path.suffix not in EXPORT_SUFFIXES and path.name not in EXPORT_FILES)
    if foreign:
        raise InputError(f"OUT={out} holds {foreign[0]}, which no export writes, and is not replaced; move it, or name another folder")


def _write(folder: Path, stored: StoredModel, tokenizer: Any, dtype: str) -> None:
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids = TokenIds(bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id, pad=pad)
    options = hf_config(stored.config) | _teacher(stored)
    save_pretrained(_finite_tensors(stored, dtype), stored.config, folder, TORCH_DTYPES[dtype], ids, hf_config=options)
    if tokenizer.pad_token is None:  # else a batch of texts could not be padded
        tokenizer.pad_token = tokenizer.eos_token
    with os_errors_told(folder):
        tokenizer.save_pretrained(folder)
    if stored.config.mixer.kind != "softmax":
        for name, content in code_files().items():
            with atomic_write(folder / name, "w") as handle:
                handle.write(content)


def _finite_tensors(stored: StoredModel, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each parameter.  Raises InputError at the first that holds what is no number, or would in `dtype`."""
    for name in stored.names:
        tensor = stored.read(name)
        if not tensor.isfinite().all():
            raise InputError(f"checkpoint {stored.checkpoint.path} holds NaN or infinity in {name}; export an earlier one")
        if not tensor.to(TORCH_DTYPES[dtype]).isfinite().all():
            raise InputError(f"--dtype={dtype} cannot hold {name}, whose values reach {tensor.abs().max():.3g}; use one of wider range")
        yield name, tensor


def _teacher(stored: StoredModel) -> dict[str, str]:
    """Whom a student has learnt from, so that it can be compared with it: a name on the hub, or a folder from here on, as `./…`.

    The way to a folder elsewhere means nothing to others, and may name its user.
    """
    hub = stored.teacher_on_hub()
    if hub or stored.teacher is None:
        return hub
    folder = Path(stored.teacher).expanduser()
    if folder.is_absolute():
        if not folder.is_relative_to(Path.cwd()):
            return {}
        folder = folder.relative_to(Path.cwd())
    return {"teacher": os.path.join(os.curdir, folder)}


def hf_config(config: ModelConfig) -> dict:
    """What config.json says of a model: its family's words, and for a student HedgeMambaConfig's."""
    published = FAMILIES[config.family].hf_config(config)
    if config.mixer.kind == "softmax":
        return published
    del published["rope_parameters"]
    rotary = {"rotary_pct": config.rotary_pct, "rotary_emb_base": config.rotary_base}
    return {**published, **rotary, **_mixer_options(config.mixer), **_code_options()}


def _mixer_options(mixer: MixerConfig) -> dict:
    """MixerConfig's fields; those that the mixer has no use for say that there is nothing, or are left out."""
    options = dataclasses.asdict(mixer)
    renamed = {"mixer": options.pop("kind"), "feature_map": FEATURE_MAP, "rope_position": options.pop("rope")}
    options |= {"decay": "none", "conv_kernel": 0, "gate": False, "bypass": False} if mixer.kind == "hedgehog" else {}
    if options["decay"] == "none":  # without a decay the step has no axis: any word may stand there
        del options["decay_step"]
    return renamed | options


def _code_options() -> dict:
    return {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], "auto_map": AUTO_MAP}


def build_hf_model(path: str | os.PathLike, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> tuple[Any, Any]:
    """The model of a run or checkpoint as what its export would load as, and its tokenizer (None where it cannot be had).

    A student is a HedgeMambaForCausalLM that runs on this package's kernels; its `generate` costs the same for every token.
    Raises InputError where there is no such checkpoint, or one of a mixer that transformers has no class for.
    """
    stored = _open_exportable(path)
    model = _empty_model(stored.config, dtype, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored.read(stored.name_of(name)))
    return model.eval(), stored.find_tokenizer()[0]


def _empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Any:
    """An uninitialised transformers model."""
    import transformers
    from transformers.initialization import no_init_weights

    from megahedge.export.configuration_hedge_mamba import HedgeMambaConfig
    from megahedge.export.modeling_hedge_mamba import HedgeMambaForCausalLM

    options = hf_config(config)
    if config.mixer.kind == "softmax":
        model_class = getattr(transformers, options["architectures"][0])
        options = model_class.config_class(**options)
    else:
        model_class, options = HedgeMambaForCausalLM, HedgeMambaConfig(**options)
    with torch.device(device), no_init_weights():
        return model_class._from_config(options, dtype=dtype)
