"""Reading tensors, whole or in slices, from the weight files of a Hugging Face folder."""

import os
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megahedge.parallel.sharding import Index
from megahedge.utils.errors import InputError
from megahedge.utils.files import read_json_object

_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_NAMES_SHOWN = 5


def few(names: list[str]) -> str:
    """The first few names and how many more there are."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


class CheckpointReader:
    """The tensors of a folder by their published names, whole or in slices, from safetensors or .bin files, in one file or several.

    Files are opened when first needed and are mapped, not read: memory holds the slices asked for.
    Raises InputError for a folder without weights, an index that names missing files, or a damaged file.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self._opened: dict[str, _SafetensorsFile | _BinFile] = {}
        self._file_of = self._locate()

    @property
    def files(self) -> list[Path]:
        """The weight files, in order of their names."""
        return [self.folder / name for name in sorted(set(self._file_of.values()))]

    @property
    def names(self) -> list[str]:
        """Published names of all tensors."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a tensor."""
        return self._open(self._file_of[name]).shape(name)

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """The tensor or a rectangular piece of it, in the file's dtype."""
        file = self._open(self._file_of[name])
        return file.read(name, index if index is not None else tuple(slice(0, length) for length in file.shape(name)))

    def _locate(self) -> dict[str, str]:
        """File of each tensor: from the index of the first kind of weights that is there, or from the one file's own header."""
        for single in _SINGLE_FILES:
            index = self.folder / f"{single}.index.json"
            if index.is_file():
                return self._read_index(index)
            if (self.folder / single).is_file():
                return dict.fromkeys(self._open(single).names(), single)
        raise InputError(f"{self.folder} holds no weights: {' or '.join(_SINGLE_FILES)} (or their .index.json) is expected")

    def _read_index(self, path: Path) -> dict[str, str]:
        file_of = read_json_object(path).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise InputError(f"{path} is damaged: it has no weight_map")
        missing = sorted(file for file in set(file_of.values()) if not (self.folder / file).is_file())
        if missing:
            raise InputError(f"{path} names {few(missing)}, missing in the folder")
        for file in sorted(set(file_of.values())):
            absent = [name for name, owner in file_of.items() if owner == file and name not in self._open(file).names()]
            if absent:
                raise InputError(f"{path} says that {file} holds {few(absent)}; it does not")
        return file_of

    def _open(self, file: str) -> "_SafetensorsFile | _BinFile":
        if file not in self._opened:
            kind = _SafetensorsFile if file.endswith(".safetensors") else _BinFile
            self._opened[file] = kind(self.folder / file)
        return self._opened[file]


class _SafetensorsFile:
    """Opened anew for every tensor: while a file is mapped, what was read of it stays in the process's memory."""

    def __init__(self, path: Path):
        self._path = path
        try:
            with safe_open(path, framework="pt") as handle:
                self._shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118 (no dict)
        except SafetensorError as error:
            raise InputError(f"{path} is damaged or no safetensors file: {error}") from error

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, index: Index) -> Tensor:
        with safe_open(self._path, framework="pt") as handle:
            return handle.get_slice(name)[index] if index else handle.get_tensor(name)


class _BinFile:
    def __init__(self, path: Path):
        try:
            # files from before torch 1.6 are no zip archives and cannot be mapped
            self._tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from None
        except Exception as error:  # a damaged pickle fails in whatever way its bytes lead to; torch's own words advise to run its code
            raise InputError(
                f"{path} is damaged, or holds pickled objects other than tensors ({type(error).__name__}), which are never loaded because "
                "they can run code; give the weights as model.safetensors, or as a .bin file of tensors alone"
            ) from error
        if not isinstance(self._tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in self._tensors.values()):
            raise InputError(f"{path} holds no table of tensors by name")

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, index: Index) -> Tensor:
        return self._tensors[name][index]
