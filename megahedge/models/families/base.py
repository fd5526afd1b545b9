"""What a family file says: its config and its parameter names, both ways."""

import abc

from megahedge.config.model import ModelConfig


class Family(abc.ABC):
    """Translation between one family's Hugging Face folders and our model.  Tensors keep their shape and layout."""

    name: str
    """`model_type` in config.json."""
    architecture: str
    """The transformers class that loads what we write."""

    @abc.abstractmethod
    def model_config(self, hf_config: dict) -> ModelConfig:
        """Our config.  Raises InputError where the published model does something that ours does not."""

    @abc.abstractmethod
    def hf_config(self, config: ModelConfig) -> dict:
        """The family's part of a config.json that transformers 5 reads."""

    @abc.abstractmethod
    def hf_name(self, name: str) -> str:
        """Published name of our parameter, as written; a student's own parameters have names beside those of the mixer."""

    @abc.abstractmethod
    def canonical_name(self, published: str) -> str:
        """`published`, or the name as we write it where other versions of transformers used another."""

    @abc.abstractmethod
    def ignorable(self, published: str) -> bool:
        """Whether it is a tensor of old checkpoints that holds no parameter: a mask, a table of frequencies."""
