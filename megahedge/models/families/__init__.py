"""Model families as Hugging Face publishes them: one file each, found by `model_type`."""

from megahedge.models.families.base import Family
from megahedge.models.families.gpt_neox import GPTNeoX
from megahedge.utils.errors import InputError

FAMILIES: dict[str, Family] = {family.name: family for family in (GPTNeoX(),)}


def family_of(hf_config: dict) -> Family:
    """The family of a parsed `config.json`.  Raises InputError, naming the families there are, for any other."""
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise InputError(f"model_type={model_type!r} is not supported; use one of {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
