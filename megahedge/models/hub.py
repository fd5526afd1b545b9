"""Finding a model: a local folder, or a snapshot from the Hugging Face hub."""

import functools
import os
from pathlib import Path

import httpx2 as httpx
import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError, HFValidationError

from megahedge.utils.errors import InputError


def resolve_pretrained(name_or_folder: str | os.PathLike, revision: str | None = None) -> Path:
    """The local folder of a model: the folder itself, or a snapshot of the hub model `name_or_folder` at `revision`.

    Raises InputError where there is neither.
    """
    folder = Path(name_or_folder).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise InputError(f"revision={revision} goes with a model of the Hugging Face hub; {folder} is a local folder")
        return folder
    if folder.exists():
        raise InputError(f"{folder} is a file; a model is a folder with config.json and weights, or a name on the Hugging Face hub")
    try:
        return _download(str(name_or_folder), revision)
    # the client's own errors, those of its HTTP library, and those of the disk
    except (HFValidationError, EntryNotFoundError, httpx.HTTPError, OSError) as error:
        raise InputError(_not_found(name_or_folder, revision, error)) from error


def _download(name: str, revision: str | None) -> Path:
    """Snapshot with safetensors weights, or with .bin weights where the revision has no others."""
    small_files = ["*.json", "*.txt", "tokenizer*", "*.model"]
    fetch = functools.partial(huggingface_hub.snapshot_download, name, revision=revision)
    folder = Path(fetch(allow_patterns=[*small_files, "model*.safetensors"]))
    if not any(folder.glob("model*.safetensors")):
        folder = Path(fetch(allow_patterns=[*small_files, "pytorch_model*.bin"]))
    return folder


def _not_found(name: str | os.PathLike, revision: str | None, error: Exception) -> str:
    at = f" at revision {revision}" if revision else ""
    offline = " (HF_HUB_OFFLINE is set)" if huggingface_hub.constants.HF_HUB_OFFLINE else ""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return (
        f"'{name}'{at} is no local folder and could not be had from the Hugging Face hub{offline}: {reason}. "
        "Give a folder with config.json and weights, or a hub name such as EleutherAI/pythia-160m; without a network, "
        "download it beforehand with `hf download NAME`"
    )
