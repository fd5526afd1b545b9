"""Batches: the same samples however a run is cut up; validation scores every token once."""

import numpy as np
import pytest
import torch
from data_helpers import numbered_documents, random_lengths, write_pair

from megahedge.data.loader import IGNORE_INDEX, BatchLoader, TrainingData, ValidationData
from megahedge.data.meta import check_documents
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


EOD = 0


def after_each_end(tokens):
    """Where a document begins within the rows of documents that end in EOD."""
    return torch.nn.functional.pad(tokens[:, :-1] == EOD, (1, 0))


@pytest.mark.parametrize("mmap", [True, False])
def test_batches_say_where_documents_begin_when_asked(tmp_path, mmap):
    write_pair(tmp_path / "x", [np.append(np.arange(1, 5 + length % 4), EOD) for length in range(20)])
    data = TrainingData(str(tmp_path / "x"), seq_len=16, seed=7, mmap=mmap)
    training = BatchLoader(data, global_batch_size=4, micro_batch_size=2, mark_documents=True)
    validation = ValidationData(tmp_path / "x", seq_len=16, mark_documents=True, mmap=mmap)
    whole = [batch for batch in validation.micro_batches(2) if (batch.labels >= 0).all()]  # padding is no document
    assert len(whole) >= 2
    for batch in (*training.micro_batches(0), *training.micro_batches(8), *whole):
        assert torch.equal(batch.boundaries, after_each_end(batch.tokens)) and batch.boundaries.any()
        assert [tensor.dtype for tensor in batch.inputs("cpu")] == [torch.int64, torch.int64, torch.bool]
    plain = next(iter(ValidationData(tmp_path / "x", seq_len=16).micro_batches(2)))
    assert plain.boundaries is None and len(plain.inputs("cpu")) == 2


def test_the_index_and_no_token_says_where_documents_begin(tmp_path):
    """EOD inside a document begins no other, and documents may end without it."""
    write_pair(tmp_path / "x", [[1, EOD, 2], [3, 4, 5, 6], [7, EOD], [8]])
    (batch,) = ValidationData(tmp_path / "x", seq_len=9, mark_documents=True).micro_batches(1)
    assert batch.boundaries[0].nonzero().flatten().tolist() == [3, 7]  # the last one's only token is a label


def test_data_whose_index_does_not_tell_documents_apart_is_refused_for_resets(tmp_path):
    check_documents(write_pair(tmp_path / "text", numbered_documents([5, 6] * 10)))
    with pytest.raises(InputError, match=r"--reset_at_documents: the 20 documents of .*rows all have 33 tokens; they are rows"):
        check_documents(write_pair(tmp_path / "rows", numbered_documents([33] * 20)))
    packed = write_pair(tmp_path / "packed", numbered_documents([33] * 20 + [7]))  # what was left for the last row
    with pytest.raises(InputError, match=r"the 21 documents of .*packed all have 33 tokens"):
        check_documents(packed)
    check_documents(write_pair(tmp_path / "small", numbered_documents([99])), training=False)
    with pytest.raises(InputError, match=r"--reset_at_documents: the index of .*one knows one document"):
        check_documents(write_pair(tmp_path / "one", numbered_documents([99])))


def test_tokens_by_corpus_follow_the_blend(tmp_path):
    for name in ("a", "b"):
        write_pair(tmp_path / name, numbered_documents([40] * 5))
    data = TrainingData(f"0.75 {tmp_path / 'a'} 0.25 {tmp_path / 'b'}", seq_len=8, seed=1)
    served = [data.blend.locate(position)[0] for position in range(10)]
    assert data.tokens_by_corpus(10) == {str(tmp_path / name): 8 * served.count(number) for number, name in enumerate("ab")}
    assert data.tokens_by_corpus(10)[str(tmp_path / "b")] in (16, 24)
