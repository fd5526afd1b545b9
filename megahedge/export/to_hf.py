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
from megahedge.export.source import StoredModel
from megahedge.export.verify import Agreement, verify_folder
from megahedge.models.families import FAMILIES
from megahedge.models.hf_weights import TokenIds, save_pretrained
from megahedge.utils.cli import positional
from megahedge.utils.errors import InputError, check_known
from megahedge.utils.files import atomic_write, disk_errors_explained, file_lock, fresh_folder
from megahedge.utils.precision import TORCH_DTYPES

MODEL_TYPE, ARCHITECTURE = "hedge_mamba", "HedgeMambaForCausalLM"
FEATURE_MAP = "hedgehog_softmax"
"""Which of the maps that go by the name of Hedgehog ours is: see HedgeMambaConfig."""
AUTO_MAP = {
    "AutoConfig": "configuration_hedge_mamba.HedgeMambaConfig",
    "AutoModel": "modeling_hedge_mamba.HedgeMambaModel",
    "AutoModelForCausalLM": f"modeling_hedge_mamba.{ARCHITECTURE}",
}


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
    """Replace a Hugging Face folder that lies at OUT."""

    def __post_init__(self):
        check_known("dtype", self.dtype, ("auto", *TORCH_DTYPES))
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
    stored = StoredModel.open(options.run)
    tokenizer = _tokenizer(stored, options.tokenizer)
    dtype = _run_dtype(stored) if options.dtype == "auto" else options.dtype
    with disk_errors_explained(options.out), _folder_in_the_making(Path(options.out), options.overwrite) as folder:
        _write(folder, stored, tokenizer, TORCH_DTYPES[dtype])
        agreement = verify_folder(folder, stored, TORCH_DTYPES[dtype]) if options.verify else None
        with atomic_write(folder / "README.md", "w") as handle:
            handle.write(model_card(stored, Path(options.out).name, dtype, agreement))
    return Export(Path(options.out), stored, dtype, agreement)


def _tokenizer(stored: StoredModel, given: str | None) -> Any:
    """The run's, or the one that was given, which must be the same.  Raises InputError where there is none."""
    if given is None:
        tokenizer, recorded = stored.find_tokenizer()
        if tokenizer is None:
            raise InputError(f"the tokenizer of {stored.checkpoint.path} is not to be found where the run had it; give --tokenizer")
    else:
        tokenizer, recorded = load_tokenizer(given, option="tokenizer"), stored.record.get("data", {}).get("tokenizer_digest")
    digest = tokenizer_digest(tokenizer)
    if recorded not in (None, digest):
        raise InputError(
            f"the tokenizer {given or tokenizer.name_or_path} has digest {digest[:12]}; the run's had {recorded[:12]}: give that one "
            "as --tokenizer"
        )
    return tokenizer


def _run_dtype(stored: StoredModel) -> str:
    """The precision that the run computed in, or that a pretrained teacher is written in; fp32 where nothing says."""
    options = stored.run_record().get("options", {})
    return options.get("export_dtype") or options.get("dtype") or "fp32"


@contextlib.contextmanager
def _folder_in_the_making(out: Path, overwrite: bool) -> Iterator[Path]:
    """A fresh folder that takes the place of `out` if all goes well, and leaves what was there if not.  Raises InputError."""
    out = out.absolute()
    _check_place(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(out.with_name(f".{out.name}.lock"), blocking=False, remove=True))
        except BlockingIOError:
            raise InputError(f"OUT={out} is being written by another process; wait for it, or name another folder") from None
        folder = held.enter_context(fresh_folder(out))
        _check_place(out, overwrite)  # again: another process may have been here, or a killed one have left the old folder aside
        yield folder


def _check_place(out: Path, overwrite: bool) -> None:
    """Refuse to write over anything but an empty folder or, where that was asked for, a Hugging Face folder."""
    if out.exists() and not out.is_dir():
        raise InputError(f"OUT={out} is a file; name a folder")
    entries = list(out.iterdir()) if out.exists() else []
    if not entries:
        return
    if (out / "config.json").is_file() and all(entry.is_file() for entry in entries):
        if not overwrite:
            raise InputError(f"OUT={out} holds a model already; name another folder, or give --overwrite to replace it")
    else:
        raise InputError(f"OUT={out} is neither empty nor a Hugging Face folder, and is not replaced; name another folder")


def _write(folder: Path, stored: StoredModel, tokenizer: Any, dtype: torch.dtype) -> None:
    tensors = ((name, stored.read(name)) for name in stored.names)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids = TokenIds(bos=tokenizer.bos_token_id, eos=tokenizer.eos_token_id, pad=pad)
    save_pretrained(tensors, stored.config, folder, dtype, ids, hf_config=hf_config(stored.config) | _teacher(stored))
    if tokenizer.pad_token is None:  # else a batch of texts could not be padded
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    if stored.config.mixer.kind != "softmax":
        for name, content in code_files().items():
            with atomic_write(folder / name, "w") as handle:
                handle.write(content)


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
    options |= {"decay": "none", "conv_kernel": 0, "gate": False} if mixer.kind == "hedgehog" else {}
    if options["decay"] == "none":  # without a decay the step has no axis: any word may stand there
        del options["decay_step"]
    return renamed | options


def _code_options() -> dict:
    return {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], "auto_map": AUTO_MAP}


def build_hf_model(path: str | os.PathLike, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> tuple[Any, Any]:
    """The model of a run or checkpoint as what its export would load as, and its tokenizer (None where it cannot be had).

    A student is a HedgeMambaForCausalLM that runs on this package's kernels; its `generate` costs the same for every token.
    Raises InputError where there is no such checkpoint.
    """
    stored = StoredModel.open(path)
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
