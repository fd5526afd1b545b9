"""Finding a tokenizer: what is missing or damaged is named, and none is made up."""

import pytest
import tokenizers
import transformers

from megahedge.data.tokenizer import load_tokenizer
from megahedge.utils.errors import InputError


@pytest.fixture
def folder(tmp_path):
    """A tokenizer of three words."""
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|endoftext|>": 0, "a": 1, "b": 2}, "<|endoftext|>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    return tmp_path


def remove_all(folder):
    for path in folder.iterdir():
        path.unlink()


def leave_config(folder):
    """A model without its tokenizer, for which transformers makes up one of two tokens."""
    remove_all(folder)
    (folder / "config.json").write_text('{"model_type": "gpt_neox"}')


def turn_into_run(folder):
    remove_all(folder)
    (folder / "hf").mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_all, "--tokenizer={folder} holds no tokenizer; give a folder with tokenizer.json"),
        (leave_config, "--tokenizer={folder} holds no tokenizer; give a folder with tokenizer.json"),
        (turn_into_run, "--tokenizer={folder} holds no tokenizer; give {folder}/hf, the model that this run has written"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "{folder}/tokenizer.json is damaged: "),
        (lambda folder: (folder / "tokenizer.json").write_text("[]"), "{folder}/tokenizer.json is damaged: "),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "--tokenizer={folder} holds a tokenizer that cannot be read ("),
        (lambda folder: (folder / "tokenizer_config.json").write_text("x"), "{folder}/tokenizer_config.json is damaged: "),
    ],
)
def test_folder_without_a_sound_tokenizer_is_refused_in_one_line(folder, damage, message):
    assert len(load_tokenizer(str(folder))) == 3
    damage(folder)
    with pytest.raises(InputError) as caught:
        load_tokenizer(str(folder), option="tokenizer")
    assert str(caught.value).startswith(message.format(folder=folder)) and "\n" not in str(caught.value)


def test_name_that_is_neither_folder_nor_hub_name_is_refused(folder):
    for name in ("", str(folder / "tokenizer.json")):
        with pytest.raises(InputError, match=f"^--tokenizer={name} is no folder; give a folder with"):
            load_tokenizer(name, option="tokenizer")
    with pytest.raises(InputError, match=r"^the tokenizer /no/such is no folder here"):
        load_tokenizer("/no/such")
