"""What there is to export: the model of a run's checkpoint, with its tokenizer and the run's records."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from megahedge.checkpoint.store import Checkpoint, open_checkpoint
from megahedge.config.model import ModelConfig
from megahedge.data.meta import tokenizer_digest
from megahedge.data.tokenizer import load_tokenizer
from megahedge.models.families import FAMILIES
from megahedge.models.handover import parameter_names
from megahedge.models.hub import was_downloaded
from megahedge.models.weight_files import few
from megahedge.parallel.sharding import Index
from megahedge.utils.errors import InputError
from megahedge.utils.files import read_json_object
from megahedge.utils.logging import get_logger

logger = get_logger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclasses.dataclass(frozen=True)
class StoredModel:
    """A checkpoint that holds exactly the parameters of the model that its record describes."""

    checkpoint: Checkpoint
    config: ModelConfig

    @classmethod
    def open(cls, path: str | os.PathLike) -> "StoredModel":
        """The newest sound checkpoint of a run folder, or the one that `path` is.

        Raises InputError where there is none, or where its record and its tensors do not fit each other or this version.
        """
        checkpoint = open_checkpoint(path, groups=("parameters",))
        try:
            config = ModelConfig.from_record(checkpoint.record["model"])
        except (KeyError, TypeError) as error:
            raise InputError(
                f"checkpoint {checkpoint.path} was written by another version: its record has no model to build ({error})"
            ) from None
        _check_names(config, checkpoint)
        return cls(checkpoint, config)

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the parameters, in the model's order, whatever the order in the checkpoint."""
        return parameter_names(self.config)

    def name_of(self, published: str) -> str | None:
        """Our name of the parameter that a model of transformers calls `published`; None where the checkpoint has none such."""
        return self._published.get(FAMILIES[self.config.family].canonical_name(published))

    @functools.cached_property
    def _published(self) -> dict[str, str]:
        family = FAMILIES[self.config.family]
        return {family.hf_name(name): name for name in self.names}

    def read(self, name: str, index: Index | None = None) -> Tensor:
        """A parameter, or a piece of it, as it was written."""
        return self.checkpoint.read("parameters", name, index)

    @property
    def record(self) -> dict:
        """What the checkpoint says of its run: stage, model, data, origin, progress."""
        return self.checkpoint.record

    @property
    def stage(self) -> str:
        """pretrain, stage1 or stage2."""
        return self.record.get("stage", "unknown stage")

    @property
    def run(self) -> Path:
        """The run folder, of which nothing else need be there."""
        return self.checkpoint.path.absolute().parent.parent

    def run_record(self) -> dict:
        """run.json; empty where the checkpoint lies by itself."""
        path = self.run / "run.json"
        return read_json_object(path) if path.is_file() else {}

    @property
    def teacher(self) -> str | None:
        """The teacher behind a stage, as the run named it: on the hub, or a folder."""
        return self.record.get("origin", {}).get("teacher")

    def teacher_on_hub(self) -> dict[str, str]:
        """`teacher` and, where the run had one, `teacher_revision`; nothing where the teacher is a folder, be it that it has gone.

        A revision goes with a model of the hub alone.
        """
        revision = self.record.get("origin", {}).get("teacher_revision")
        if self.teacher is None or (revision is None and not was_downloaded(self.teacher)):
            return {}
        return {"teacher": self.teacher} | ({} if revision is None else {"teacher_revision": revision})

    @property
    def tokenizer_digest(self) -> str | None:
        """Identity of the tokenizer that the run had; None where nothing says."""
        return entry(self.record, "data", "tokenizer_digest") or entry(self.run_record(), "data", "tokenizer_digest")

    def find_tokenizer(self) -> tuple[Any | None, str | None]:
        """The tokenizer and its digest; the digest alone, or two times None, where it cannot be had or is another (with a warning)."""
        (tokenizer, digest), recorded = self._tokenizer_of_origin(), self.tokenizer_digest
        if tokenizer is not None and recorded not in (None, digest):
            found = f"{tokenizer.name_or_path} holds a tokenizer of digest {digest[:12]}"
            logger.warning("%s, the run's had %s: it has been replaced and is not used", found, recorded[:12])
            tokenizer = None
        return tokenizer, recorded or digest

    def _tokenizer_of_origin(self) -> tuple[Any | None, str | None]:
        """That which a pretrained model lies with, or that of the teacher behind a stage."""
        if (self.run / "hf").is_dir():
            return find_tokenizer(self.run / "hf")
        if self.teacher is None:
            return None, None
        revision = self.record["origin"]["teacher_revision"]
        try:
            tokenizer = load_tokenizer(teacher_place(self.teacher, revision, self.run), revision)
        except InputError as error:
            logger.warning("the tokenizer of the run's teacher: %s", error)
            return None, None
        return tokenizer, tokenizer_digest(tokenizer)


def _check_names(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """The checkpoint must hold the model's parameters, and nothing that the model would leave out."""
    wanted, there = parameter_names(config), set(checkpoint.names("parameters"))
    missing = [name for name in wanted if name not in there]
    unexpected = sorted(there - set(wanted))
    if missing or unexpected:
        raise InputError(
            f"checkpoint {checkpoint.path} does not hold the {len(wanted)} tensors that its record describes: "
            f"{len(missing)} missing ({few(missing)}), {len(unexpected)} unexpected ({few(unexpected)})"
        )


def entry(record: Any, *names: str) -> Any:
    """What is recorded under a name, or under a name below others; None where there is nothing, or something of another kind."""
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record


def teacher_place(name: str, revision: str | None, student: Path) -> str:
    """The teacher that the student in a folder names: a folder, or `name` as it is, for the hub.

    Relative ones are those of the folder that the run, or its export, was started in: here, or one above the student.
    """
    given = Path(os.path.expanduser(name))
    if revision is not None:  # which only the hub has
        return name
    places = [given, *(above / given for above in student.resolve().parents)]
    return next((str(place) for place in places if os.path.isdir(place)), name)


def find_tokenizer(folder: Path) -> tuple[Any | None, str | None]:
    """A Hugging Face folder's tokenizer and its digest; two times None where there is none."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None, None
    tokenizer = load_tokenizer(str(folder))
    return tokenizer, tokenizer_digest(tokenizer)
