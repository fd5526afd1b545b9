"""Finding the tokenizer of a model."""

from megahedge.utils.errors import InputError


def load_tokenizer(name: str, revision: str | None = None):
    """A fast Hugging Face tokenizer from a folder or the hub.  Raises InputError where there is none."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"no tokenizer at {name}: {first_line}") from None
    if not tokenizer.is_fast:
        raise InputError(f"the tokenizer at {name} has no fast version (tokenizer.json), which preprocessing needs")
    return tokenizer
