"""Finding a tokenizer: what is missing or damaged is named, and none is made up."""

import json
import shutil

import pytest
import tokenizers
import transformers
from data_helpers import write_jsonl

from megahedge.data.indexed_dataset import IndexedDataset, bin_path
from megahedge.data.inspect import InspectConfig, inspect_dataset
from megahedge.data.meta import check_tokenizer, tokenizer_digest
from megahedge.data.preprocess import PreprocessConfig, preprocess
from megahedge.data.tokenizer import SentencePieceTokenizer, load_tokenizer
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


# ---- SentencePiece ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    """A small model with byte fall-back, trained here."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    folder = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(
            [f"the {word} fox number {place} jumps over lazy dogs" for place in range(300) for word in ("quick", "brown")]
        ),
        model_prefix=str(folder / "small"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",  # by default it would turn line breaks into blanks
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return folder / "small.model"


def test_text_comes_back_through_a_sentencepiece_model(tmp_path, sentencepiece_model):
    texts = ["the quick fox jumps over dogs", "another line\nand naïve bytes 🙂", "the lazy dogs"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    for workers in (1, 2):
        config = PreprocessConfig(
            output_prefix=str(tmp_path / f"out{workers}"),
            input=(str(source),),
            sentencepiece=str(sentencepiece_model),
            val_fraction=0.0,
            workers=workers,
        )
        meta = preprocess(config)
    tokenizer, dataset = SentencePieceTokenizer(str(sentencepiece_model)), IndexedDataset(tmp_path / "out2_train")
    assert meta.eod_id == tokenizer.eos_token_id == 2 and meta.vocab_size == 400
    assert [tokenizer.decode(dataset.document(number)[:-1]) for number in range(3)] == texts
    assert all(dataset.document(number)[-1] == 2 for number in range(3))
    assert bin_path(tmp_path / "out1_train").read_bytes() == bin_path(tmp_path / "out2_train").read_bytes()
    lines, sound = inspect_dataset(InspectConfig(prefix=str(tmp_path / "out2_train"), check=True, document=1))
    assert sound and texts[1] in lines[-1]


def test_data_of_a_sentencepiece_model_fits_the_teacher_that_has_it_and_no_other(tmp_path, sentencepiece_model, folder):
    """What counts is what the teacher's tokenizer does, which transformers has converted."""
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    shutil.copy(sentencepiece_model, teacher / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (teacher / "tokenizer_config.json").write_text(json.dumps(settings))
    own, other = load_tokenizer(str(teacher)), load_tokenizer(str(folder))
    source = write_jsonl(tmp_path / "a.jsonl", ["the quick fox", "lazy dogs"])
    config = PreprocessConfig(
        output_prefix=str(tmp_path / "out"), input=(str(source),), sentencepiece=str(sentencepiece_model), val_fraction=0.0, workers=1
    )
    meta = preprocess(config)
    check_tokenizer(meta, tokenizer_digest(own), "the teacher", own)
    with pytest.raises(InputError, match=r"was made with the SentencePiece model .*small\.model .*, not with that of another teacher"):
        check_tokenizer(meta, tokenizer_digest(other), "another teacher", other)
    with pytest.raises(InputError, match="is a SentencePiece model, which serves preprocessing alone; give a Hugging Face folder"):
        load_tokenizer(meta.tokenizer_name, option="tokenizer")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read: No such file"), (b"words", "is no SentencePiece model"), (b"", "is no SentencePiece model")],
)
def test_a_file_that_is_no_sentencepiece_model_is_refused(tmp_path, content, message):
    pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    if content is not None:
        (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(InputError, match=f"^--sentencepiece=.*x.model {message}"):
        SentencePieceTokenizer(str(tmp_path / "x.model"))


def test_one_tokenizer_is_named(tmp_path):
    for values in ({}, {"tokenizer": "a", "sentencepiece": "b"}):
        with pytest.raises(InputError, match="give one of --tokenizer FOLDER_OR_NAME and --sentencepiece FILE"):
            PreprocessConfig(output_prefix=str(tmp_path / "out"), **values)
