"""What the repository carries to be tried without a download: a teacher, its tokenizer, and text."""

import subprocess
from pathlib import Path

import pytest
import torch
import transformers

from megahedge.data.meta import tokenizer_digest
from megahedge.data.preprocess import PreprocessConfig, preprocess
from megahedge.data.tokenizer import load_tokenizer
from megahedge.evaluation.evaluate import evaluate
from megahedge.evaluation.options import EvaluateOptions
from megahedge.models.hf_weights import load_config

REPOSITORY = Path(__file__).parents[1]
QUICKSTART = REPOSITORY / "scripts" / "quickstart"
TEACHER = QUICKSTART / "teacher"
# fp32 sums in another order: the two implementations differ by 1e-7 of the loss
SAME_LOSS = 1e-6


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """The held-out part of the carried text, tokenised."""
    prefix = str(tmp_path_factory.mktemp("quickstart") / "small")
    text = str(QUICKSTART / "text.jsonl.gz")
    preprocess(PreprocessConfig(output_prefix=prefix, tokenizer=str(TEACHER), input=(text,), val_fraction=0.02, workers=1))
    return prefix


def score(data: str, implementation: str, **options) -> dict:
    model = EvaluateOptions(model=str(TEACHER), data_path=data, seq_len=512, implementation=implementation, **options)
    return evaluate(model).record()


@pytest.mark.slow
def test_transformers_gives_the_carried_teacher_our_perplexity(data):
    ours, theirs = (score(data, implementation, eval_tokens=50_000) for implementation in ("megahedge", "transformers"))
    assert ours["figures"]["loss"] == pytest.approx(theirs["figures"]["loss"], rel=SAME_LOSS)
    assert ours["model"]["implementation"] != theirs["model"]["implementation"]


@pytest.mark.slow
def test_carried_teacher_has_learnt_its_text(data):
    """A model that knows the frequencies of tokens and nothing else has a perplexity of several hundred here."""
    assert score(data, "megahedge", eval_tokens=50_000)["figures"]["token_perplexity"] < 60


@pytest.mark.slow
def test_carried_teacher_has_recall_to_lose(data):
    """Shuffling what it has read costs it 0.15 nats a token at least; a model that looks at single tokens only would lose nothing."""
    probe = score(data, "megahedge", eval_tokens=5_000, context_probe=True)["context_probe"]
    assert probe["difference"] - 2 * probe["standard_error"] >= 0.15


def test_carried_teacher_loads_in_transformers_with_its_tokenizer():
    tokenizer = load_tokenizer(str(TEACHER))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.config.vocab_size == load_config(TEACHER).vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer("two  spaces, ünïcode")["input_ids"]) == "two  spaces, ünïcode"
    assert len(tokenizer_digest(tokenizer)) == 64


def test_repository_stays_small():
    listed = subprocess.run(["git", "-C", REPOSITORY, "ls-files", "-z"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, so there is no list of the repository's files")
    files = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
    assert sum(path.stat().st_size for path in files if path.is_file()) <= 12 * 2**20
