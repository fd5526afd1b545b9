"""What both stages need of the teacher before they can be planned."""

import dataclasses
from pathlib import Path
from typing import Any

from megahedge.config.model import ModelConfig
from megahedge.config.options import TrainOptions
from megahedge.data.blending import parse_data_path
from megahedge.data.meta import find_split
from megahedge.data.tokenizer import load_tokenizer
from megahedge.models.hf_weights import load_config
from megahedge.models.hub import resolve_pretrained


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A teacher that was found."""

    name: str
    """As the user gave it."""
    folder: Path
    """Where its files are on this machine."""
    config: ModelConfig
    tokenizer: Any

    @classmethod
    def find(cls, name: str, revision: str | None) -> "Teacher":
        """Look it up, or download it.  Raises InputError."""
        folder = resolve_pretrained(name, revision)
        return cls(name, folder, load_config(folder), load_tokenizer(str(folder)))

    @property
    def short_name(self) -> str:
        """For the names of run folders."""
        return self.name.rstrip("/").split("/")[-1]


def check_data_exists(options: TrainOptions) -> None:
    """Raise InputError where there is no data at all: the first thing to say, before a teacher is looked up or downloaded."""
    for _, prefix in parse_data_path(options.data_path):
        find_split(prefix, "train")
