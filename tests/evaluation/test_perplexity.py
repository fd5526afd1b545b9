"""Token perplexity: every token once, the same whatever the batches, and what transformers says."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from megahedge.data.find_sources import iterate_texts
from megahedge.data.loader import IGNORE_INDEX, ValidationData
from megahedge.evaluation.models import open_model
from megahedge.evaluation.perplexity import measure_perplexity
from tests.evaluation.small import VOCAB_SIZE, byte_tokenizer, write_run, write_texts


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "bytes"
    return write_texts(path, byte_tokenizer()).prefix


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    write_run(path, None)
    return path / "hf"


def measure(token_losses, prefix, seq_len=32, micro_batch_size=4, max_tokens=None):
    return measure_perplexity(token_losses, ValidationData(prefix, seq_len, max_tokens).micro_batches(micro_batch_size))


def uniform_losses(tokens, labels):
    return torch.full(labels.shape, math.log(VOCAB_SIZE)).masked_fill(labels == IGNORE_INDEX, 0)


def plain_loop(folder, stream: np.ndarray, seq_len: int) -> tuple[float, int]:
    """Summed loss and count, one window at a time, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    nats, count = 0.0, 0
    for start in range(0, len(stream) - 1, seq_len):
        window = torch.from_numpy(stream[start : start + seq_len + 1].astype(np.int64))
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0]
        nats += F.cross_entropy(logits.double(), window[1:], reduction="sum").item()
        count += len(window) - 1
    return nats, count


@pytest.mark.parametrize("seq_len", [1, 7, 32, 10_000])
@pytest.mark.parametrize("micro_batch_size", [1, 3])
@pytest.mark.parametrize("max_tokens", [None, 100])
def test_every_token_is_scored_once_and_in_order(prefix, seq_len, micro_batch_size, max_tokens):
    scored = []

    def recording(tokens, labels):
        scored.extend(labels[labels != IGNORE_INDEX].tolist())
        return uniform_losses(tokens, labels)

    measured = measure(recording, prefix, seq_len, micro_batch_size, max_tokens)
    stream = np.fromfile(f"{prefix}.bin", np.uint16)
    assert scored == stream[1:][:max_tokens].tolist()
    assert measured.tokens == len(scored)


def test_uniform_model_has_the_vocabulary_as_perplexity(prefix):
    assert measure(uniform_losses, prefix).token_perplexity == pytest.approx(VOCAB_SIZE, rel=1e-6)  # fp32 holds log(257) to 3e-8


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 7, 50])
def test_micro_batch_size_does_not_change_the_figure(prefix, folder, micro_batch_size):
    model = open_model(folder)
    expected = measure(model.token_losses, prefix, micro_batch_size=4)
    measured = measure(model.token_losses, prefix, micro_batch_size=micro_batch_size)
    assert measured.tokens == expected.tokens
    assert measured.nats == pytest.approx(expected.nats, rel=1e-6)  # fp32 losses, summed in fp64


@pytest.mark.parametrize("seq_len", [1, 5, 64, 4096])
def test_cut_into_windows_does_not_change_the_figure_of_a_model_without_context(prefix, seq_len):
    table = torch.rand(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def bigram_losses(tokens, labels):
        return table[tokens, labels.clamp(min=0)].masked_fill(labels == IGNORE_INDEX, 0)

    stream = np.fromfile(f"{prefix}.bin", np.uint16).astype(np.int64)
    measured = measure(bigram_losses, prefix, seq_len)
    assert measured.nats == pytest.approx(table.double().numpy()[stream[:-1], stream[1:]].sum(), rel=1e-12)  # the order of an fp64 sum


@pytest.mark.parametrize("implementation", ["megahedge", "transformers"])
@pytest.mark.parametrize("seq_len", [32, 50])
def test_figure_is_that_of_a_plain_loop_with_transformers(prefix, folder, implementation, seq_len):
    nats, count = plain_loop(folder, np.fromfile(f"{prefix}.bin", np.uint16), seq_len)
    measured = measure(open_model(folder, implementation).token_losses, prefix, seq_len)
    assert measured.tokens == count
    assert measured.nats == pytest.approx(nats, rel=1e-6)  # fp32 logits of two implementations


def test_trained_model_has_the_figure_of_a_plain_loop(test_data, tmp_path):
    folder = test_data / "models" / "standin-neox"
    texts = [text[:3000] for text in itertools.islice(iterate_texts([str(test_data / "text" / "permissive.jsonl.gz")]), 5)]
    dataset = write_texts(tmp_path / "real", AutoTokenizer.from_pretrained(folder), texts)
    nats, count = plain_loop(folder, np.fromfile(f"{dataset.prefix}.bin", np.uint16), 128)
    measured = measure(open_model(folder).token_losses, dataset.prefix, 128)
    assert measured.tokens == count > 3000
    assert measured.nats == pytest.approx(nats, rel=1e-6)  # fp32 logits of two implementations
    assert measured.token_perplexity < 200  # a trained model on text of its kind; a random one has 2048
