"""Batches: the same samples however a run is cut up; validation scores every token once."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_helpers import numbered_documents, random_lengths, write_pair

from megahedge.data.loader import IGNORE_INDEX, BatchLoader, TrainingData, ValidationData, document_starts
from megahedge.data.meta import DatasetMeta, end_of_documents, write_meta
from megahedge.utils.errors import InputError


@pytest.fixture
def prefix(tmp_path):
    write_pair(tmp_path / "x", numbered_documents(random_lengths(80, 1, 30)))
    return str(tmp_path / "x")


def consumed(data, *, batch=8, micro_batch=2, dp_size=1, start=0, steps=6):
    """Tokens by position over some steps, put together from all ranks."""
    rows = {}
    for step in range(steps):
        for rank in range(dp_size):
            loader = BatchLoader(data, global_batch_size=batch, micro_batch_size=micro_batch, dp_rank=rank, dp_size=dp_size)
            for part in loader.micro_batches(start + step * batch):
                for row, position in enumerate(part.positions):
                    assert position not in rows
                    rows[position] = torch.cat([part.tokens[row], part.labels[row, -1:]]).tolist()
                assert torch.equal(part.tokens[:, 1:], part.labels[:, :-1])
    return rows


@pytest.mark.parametrize(("micro_batch", "dp_size"), [(1, 1), (8, 1), (4, 2), (1, 2), (2, 4), (1, 8)])
def test_samples_do_not_depend_on_ranks_or_micro_batches(prefix, micro_batch, dp_size):
    data = TrainingData(prefix, seq_len=16, seed=7)
    reference = {position: data.sample(position).tolist() for position in range(48)}
    assert consumed(data, micro_batch=micro_batch, dp_size=dp_size) == reference


def test_global_batch_size_only_cuts_the_same_order(prefix):
    data = TrainingData(prefix, seq_len=16, seed=7)
    assert consumed(data, batch=8, steps=6) == consumed(data, batch=24, steps=2) == consumed(data, batch=2, steps=24)


@pytest.mark.parametrize("start", [0, 1, 5, 37, 90])
def test_restart_at_any_position_goes_on_with_the_same_samples(prefix, start):
    unbroken = TrainingData(prefix, seq_len=16, seed=7)
    expected = {position: unbroken.sample(position).tolist() for position in range(start, start + 16)}
    assert consumed(TrainingData(prefix, seq_len=16, seed=7), start=start, steps=2) == expected


def test_documented_position_of_a_row(prefix):
    data = TrainingData(prefix, seq_len=16, seed=7)
    loader = BatchLoader(data, global_batch_size=24, micro_batch_size=3, dp_rank=1, dp_size=2)
    assert [batch.positions for batch in loader.micro_batches(100)] == [(103, 104, 105), (109, 110, 111), (115, 116, 117), (121, 122, 123)]


def test_batch_that_does_not_divide_is_refused(prefix):
    with pytest.raises(InputError, match="global_batch_size=8"):
        BatchLoader(TrainingData(prefix, 16, 7), global_batch_size=8, micro_batch_size=3, dp_size=1)


def test_blended_corpora_keep_their_own_orders(tmp_path):
    for name, offset in (("a", 0), ("b", 10_000)):
        write_pair(tmp_path / name, [document + offset for document in numbered_documents(random_lengths(50, 1, 30))])
    blended = TrainingData(f"0.75 {tmp_path}/a 0.25 {tmp_path}/b", seq_len=16, seed=3)
    alone = {name: TrainingData(str(tmp_path / name), seq_len=16, seed=3) for name in "ab"}
    served = {"a": 0, "b": 0}
    for position in range(200):
        sample = blended.sample(position)
        name = "a" if sample[0] < 10_000 else "b"
        np.testing.assert_array_equal(sample, alone[name].sample(served[name]))
        served[name] += 1
    assert served == {"a": 150, "b": 50}
    assert blended.epochs(200) == [150 * 16 / alone["a"].indices[0].dataset.num_tokens, 50 * 16 / alone["b"].indices[0].dataset.num_tokens]


def test_id_outside_the_vocabulary_names_dataset_and_sample(tmp_path):
    write_pair(tmp_path / "x", [[1, 2, 3], [4, 500, 6]])
    data = TrainingData(str(tmp_path / "x"), seq_len=6, seed=0)
    list(BatchLoader(data, global_batch_size=1, micro_batch_size=1, vocab_size=501).micro_batches(0))
    with pytest.raises(InputError, match=r"token id 500 .* vocabulary of 500.*x, sample 0 \(position 0"):
        list(BatchLoader(data, global_batch_size=1, micro_batch_size=1, vocab_size=500).micro_batches(0))


def scored(data, micro_batch, dp_size):
    """(input, label) pairs that count, in order of the windows, put together from all ranks."""
    windows = {}
    counts = set()
    for rank in range(dp_size):
        batches = list(data.micro_batches(micro_batch, rank, dp_size))
        counts.add(len(batches))
        for batch in batches:
            assert batch.tokens.shape == batch.labels.shape == (micro_batch, data.seq_len)
            for row, window in enumerate(batch.positions):
                kept = batch.labels[row] != IGNORE_INDEX
                windows[window] = list(zip(batch.tokens[row][kept].tolist(), batch.labels[row][kept].tolist(), strict=True))
    assert len(counts) == 1, "ranks with different numbers of micro-batches would wait for one another for ever"
    return [pair for window in sorted(windows) for pair in windows[window]]


@pytest.mark.parametrize("num_tokens", [2, 8, 9, 10, 16, 17, 100])
@pytest.mark.parametrize(("micro_batch", "dp_size"), [(1, 1), (3, 1), (2, 2), (1, 4)])
def test_validation_scores_every_token_but_the_first_once(tmp_path, num_tokens, micro_batch, dp_size):
    write_pair(tmp_path / "x_val", numbered_documents([1, num_tokens - 1]))
    data = ValidationData(tmp_path / "x_val", seq_len=8)
    assert scored(data, micro_batch, dp_size) == [(token, token + 1) for token in range(num_tokens - 1)]
    assert data.num_scored_tokens == num_tokens - 1


@pytest.mark.parametrize("limit", [1, 7, 8, 9, 1000])
def test_eval_tokens_scores_the_first_so_many(tmp_path, limit):
    write_pair(tmp_path / "x_val", numbered_documents([50]))
    data = ValidationData(tmp_path / "x_val", seq_len=8, max_tokens=limit)
    assert scored(data, 2, 2) == [(token, token + 1) for token in range(min(limit, 49))]


def test_validation_windows_do_not_overlap(tmp_path):
    write_pair(tmp_path / "x_val", numbered_documents([33]))
    (batch,) = ValidationData(tmp_path / "x_val", seq_len=8).micro_batches(4)
    assert batch.tokens.tolist() == np.arange(32).reshape(4, 8).tolist()


@pytest.mark.parametrize("documents", [[], [[5]]])
def test_validation_without_a_token_to_score_says_what_there_is(tmp_path, documents):
    write_pair(tmp_path / "x_val", documents)
    with pytest.raises(InputError, match=f"has {len(documents)} tokens.*--val_fraction"):
        ValidationData(tmp_path / "x_val", seq_len=8)


def test_a_document_begins_after_each_end_of_one():
    tokens = torch.tensor([[5, 0, 7, 0, 0, 3], [0, 1, 2, 3, 4, 0]])
    assert document_starts(tokens, eod_id=0).tolist() == [
        [False, False, True, False, True, True],
        [False, True, False, False, False, False],
    ]
    assert document_starts(tokens, eod_id=None) is None


def test_batches_say_where_documents_begin_when_asked(tmp_path):
    write_pair(tmp_path / "x", [np.append(np.arange(1, 6), 0) for _ in range(20)])
    training = BatchLoader(TrainingData(str(tmp_path / "x"), seq_len=16, seed=7), global_batch_size=4, micro_batch_size=2, eod_id=0)
    validation = ValidationData(tmp_path / "x", seq_len=16, eod_id=0)
    for batch in (*training.micro_batches(0), *validation.micro_batches(2)):
        assert torch.equal(batch.boundaries, document_starts(batch.tokens, 0)) and batch.boundaries.any()
        assert [tensor.dtype for tensor in batch.inputs("cpu")] == [torch.int64, torch.int64, torch.bool]
    plain = next(iter(ValidationData(tmp_path / "x", seq_len=16).micro_batches(2)))
    assert plain.boundaries is None and len(plain.inputs("cpu")) == 2


def test_the_token_that_ends_documents_is_asked_of_the_data_or_else_of_the_tokenizer(tmp_path):
    tokenizer = SimpleNamespace(eos_token_id=7)
    own, other, without, bare = (str(tmp_path / name) for name in ("own", "other", "without", "bare"))
    for prefix, eod_id, options in ((own, 7, {}), (other, 0, {}), (without, 7, {"append_eod": False})):
        write_meta(prefix, DatasetMeta("digest", "tokenizer", 100, eod_id, {}, options=options))
    assert end_of_documents([own, bare], tokenizer, "T") == 7
    assert end_of_documents([other], tokenizer, "T") == 0
    with pytest.raises(InputError, match=r"--reset_at_documents: .*without was made without a token at the end"):
        end_of_documents([own, without], tokenizer, "T")
    with pytest.raises(InputError, match="--reset_at_documents: documents end with other tokens"):
        end_of_documents([own, other], tokenizer, "T")
    with pytest.raises(InputError, match=r"--reset_at_documents needs a token .* T names none"):
        end_of_documents([bare], SimpleNamespace(eos_token_id=None), "T")
