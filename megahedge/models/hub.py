"""Finding a model: a local folder, or a snapshot from the Hugging Face hub."""

import contextlib
import functools
import os
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.utils  # by themselves, until something has imported them, both are no attributes of the package

from megahedge.utils.errors import InputError
from megahedge.utils.files import file_lock

_CONFIG_FILES = ("config.json", "generation_config.json", "*.index.json")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")


def resolve_pretrained(name_or_folder: str | os.PathLike, revision: str | None = None) -> Path:
    """The local folder of a model: the folder itself, or a snapshot of the hub model `name_or_folder` at `revision`.

    Raises InputError where there is neither.
    """
    folder = Path(os.path.expanduser(name_or_folder))
    if not os.fspath(name_or_folder).strip():
        raise InputError("the name of the model is empty; give a folder with config.json and weights, or a name on the Hugging Face hub")
    if os.path.isdir(folder):  # unlike Path.is_dir, false for a name that is too long
        if revision is not None:
            raise InputError(f"revision={revision} goes with a model of the Hugging Face hub; {folder} is a local folder")
        return folder
    if os.path.exists(folder):
        raise InputError(f"{folder} is a file; a model is a folder with config.json and weights, or a name on the Hugging Face hub")
    try:
        return _download(str(name_or_folder), revision)
    except huggingface_hub.utils.HFValidationError:
        raise InputError(
            f"'{name_or_folder}' is no local folder, and the Hugging Face hub has no names like it; "
            "give a folder with config.json and weights, or a hub name such as EleutherAI/pythia-160m"
        ) from None
    except Exception as error:  # the client lets errors of its HTTP library through, and that library changes with its versions
        raise InputError(_not_found(name_or_folder, revision, error)) from error


def was_downloaded(name: str) -> bool:
    """Whether the hub's cache on this machine holds the model of that name, which tells such a name from a folder's that has gone."""
    if os.path.exists(os.path.expanduser(name)):  # which goes before the hub
        return False
    try:
        return isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str)
    except huggingface_hub.utils.HFValidationError:  # such as an absolute path
        return False


def find_local(name_or_folder: str, revision: str | None = None) -> Path | None:
    """The folder of a model that is on this machine, by its place or in the hub's cache; None where it would have to be downloaded."""
    folder = Path(os.path.expanduser(name_or_folder))
    if os.path.exists(folder):
        return resolve_pretrained(name_or_folder, revision)
    try:
        return Path(huggingface_hub.snapshot_download(name_or_folder, revision=revision, local_files_only=True))
    except (huggingface_hub.utils.HFValidationError, huggingface_hub.utils.LocalEntryNotFoundError):
        return None


def _download(name: str, revision: str | None) -> Path:
    """Snapshot with safetensors weights, or with .bin weights where the revision has no others.

    The ranks of a node that share a cache come one after the other: the first fetches the files, the others find them.
    """
    huggingface_hub.utils.validate_repo_id(name)
    lock = Path(huggingface_hub.constants.HF_HUB_CACHE) / ".locks" / f"megahedge--{name.replace('/', '--')}"
    others = [*_CONFIG_FILES, *_TOKENIZER_FILES]
    fetch = functools.partial(huggingface_hub.snapshot_download, name, revision=revision)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # a cache that only others may write is there to be read
            held.enter_context(file_lock(lock))
        folder = Path(fetch(allow_patterns=[*others, "model*.safetensors"]))
        if not any(folder.glob("model*.safetensors")):
            folder = Path(fetch(allow_patterns=[*others, "pytorch_model*.bin"]))
    return folder


def _not_found(name: str | os.PathLike, revision: str | None, error: Exception) -> str:
    at = f" at revision {revision}" if revision else ""
    offline = " (HF_HUB_OFFLINE is set)" if huggingface_hub.constants.HF_HUB_OFFLINE else ""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return (
        f"'{name}'{at} is no local folder and could not be had from the Hugging Face hub{offline}: {reason}. "
        "Give a folder with config.json and weights, or a hub name such as EleutherAI/pythia-160m; without a network, "
        "fetch it beforehand with tools/download.py"
    )
