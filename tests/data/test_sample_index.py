"""The order of samples: complete, seeded, independent of everything but seed, position and content."""

import hashlib
import os

import numpy as np
import pytest
from data_helpers import numbered_documents, random_lengths, write_pair

import megahedge.data.sample_index as sample_index
from megahedge.data import index_cache
from megahedge.data.indexed_dataset import bin_path
from megahedge.data.sample_index import SampleIndex, permutation
from megahedge.utils.errors import InputError


def corpus(tmp_path, lengths, name="x"):
    return write_pair(tmp_path / name, numbered_documents(lengths))


def read_all(index, count):
    return np.stack([index.read(position) for position in range(count)])


def test_permutation_is_what_splitmix64_says():
    """A change of this order would silently reshuffle every resumed run."""
    mask = 2**64 - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = 0
    for part in (1234, 5, 1):
        key = mix((key + part + 1) & mask)
    hashes = [mix((key + (index + 1) * 0x9E3779B97F4A7C15) & mask) for index in range(1000)]
    expected = sorted(range(1000), key=hashes.__getitem__)
    assert permutation(1000, 1234, 5, 1).tolist() == expected
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the published first output of splitmix64 with seed 0


def test_permutations_differ_by_seed_epoch_and_purpose():
    orders = [permutation(100, *key).tolist() for key in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_order_is_pinned(tmp_path):
    """Content, seed and position give these very tokens on every machine and in every later version."""
    index = SampleIndex(corpus(tmp_path, random_lengths(50, 1, 40)), seq_len=16, seed=1234)
    digest = hashlib.sha256(read_all(index, 200).astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == "4edfa7c78278936f"


def test_samples_follow_from_the_definition(tmp_path):
    """Against the endless stream written out: documents in the epoch's permutation, samples permuted within the epoch they start in."""
    lengths, seq_len, seed, epochs = random_lengths(20, 1, 9), 7, 3, 5
    documents = numbered_documents(lengths)
    total = sum(lengths)
    stream = np.concatenate([documents[d] for epoch in range(epochs + 2) for d in permutation(len(lengths), seed, epoch, 0)])
    expected = []
    for epoch in range(epochs):
        starting = [s for s in range(len(stream)) if epoch * total <= s * seq_len < (epoch + 1) * total]
        expected += [
            stream[s * seq_len : s * seq_len + seq_len + 1] for s in (starting[i] for i in permutation(len(starting), seed, epoch, 1))
        ]
    index = SampleIndex(corpus(tmp_path, lengths), seq_len, seed)
    np.testing.assert_array_equal(read_all(index, len(expected)), np.stack(expected))


@pytest.mark.parametrize("seq_len", [1, 5, 16, 64])
def test_every_token_is_a_target_once_an_epoch(tmp_path, seq_len):
    """Over three epochs of whole samples each token is an input three times and a target three times.

    Two exceptions by definition: the first token of all has nothing before it, and the last sample's last target opens epoch 3.
    """
    lengths = random_lengths(64, 1, 30)
    lengths[-1] += -sum(lengths) % seq_len
    total = sum(lengths)
    index = SampleIndex(corpus(tmp_path, lengths), seq_len, seed=11)
    samples = read_all(index, 3 * total // seq_len)
    inputs, targets = (np.bincount(part.ravel(), minlength=total) for part in (samples[:, :-1], samples[:, 1:]))
    assert inputs.tolist() == [3] * total
    starts = np.cumsum([0, *lengths])
    expected = np.full(total, 3)
    expected[starts[permutation(len(lengths), 11, 0, 0)[0]]] -= 1
    expected[starts[permutation(len(lengths), 11, 3, 0)[0]]] += 1
    assert targets.tolist() == expected.tolist()


def test_samples_straddle_the_border_of_epochs_without_loss(tmp_path):
    """T is no multiple of L: in E epochs every token is an input E times, but for the few of the last, unfinished sample."""
    lengths, seq_len, epochs = random_lengths(30, 1, 12), 10, 7
    total = sum(lengths)
    assert total % seq_len
    index = SampleIndex(corpus(tmp_path, lengths), seq_len, seed=2)
    count = index.first_sample(epochs)
    inputs = np.bincount(read_all(index, count)[:, :-1].ravel(), minlength=total)
    assert inputs.min() == epochs and inputs.sum() == count * seq_len
    assert inputs.sum() - epochs * total < seq_len


def test_sample_numbers_of_an_epoch_are_a_permutation(tmp_path):
    index = SampleIndex(corpus(tmp_path, random_lengths(100, 1, 50)), seq_len=13, seed=4)
    for epoch in range(3):
        first, end = index.first_sample(epoch), index.first_sample(epoch + 1)
        numbers = [index.sample_number(position) for position in range(first, end)]
        assert sorted(numbers) == list(range(first, end))
        assert numbers != list(range(first, end))


@pytest.mark.parametrize("lengths", [[1], [3], [1, 1, 1], [5, 2]])
def test_corpus_shorter_than_one_sample_works(tmp_path, lengths):
    total, seq_len = sum(lengths), 16
    index = SampleIndex(corpus(tmp_path, lengths), seq_len, seed=0)
    samples = read_all(index, 20)
    flat = np.concatenate([samples[index_][:-1] for index_ in np.argsort([index.sample_number(q) for q in range(20)])])
    for epoch in range(20 * seq_len // total):
        assert sorted(flat[epoch * total : (epoch + 1) * total]) == list(range(total))


def test_long_document_is_served_whole(tmp_path):
    """70,001 tokens in one document, more than 16 bits count: each is an input exactly once in the first epoch."""
    documents = [np.arange(70_001), [70_001, 70_002]]
    dataset = write_pair(tmp_path / "x", documents, np.int32)
    index = SampleIndex(dataset, 8, seed=1)
    inputs = np.bincount(read_all(index, index.first_sample(1))[:, :-1].ravel(), minlength=70_003)
    assert inputs.min() == 1


def test_pieces_name_the_documents_of_a_sample(tmp_path):
    lengths = random_lengths(40, 1, 9)
    documents = numbered_documents(lengths)
    index = SampleIndex(corpus(tmp_path, lengths), 11, seed=5)
    for position in range(60):
        pieces = index.pieces(position)
        tokens = np.concatenate([documents[piece.document][piece.start : piece.start + piece.count] for piece in pieces])
        assert tokens.tolist() == index.read(position).tolist()
        assert all(piece.start == 0 for piece in pieces[1:])


def test_corpus_without_tokens_is_refused(tmp_path):
    with pytest.raises(InputError, match="no tokens"):
        SampleIndex(write_pair(tmp_path / "x", []), 8, seed=0)


def test_sample_positions_beyond_32_bits(tmp_path):
    """Tokens 10^12 into the stream, with arithmetic that 32-bit, or float64 of the product, would get wrong."""
    index = SampleIndex(corpus(tmp_path, [97, 100]), 1000, seed=1)
    position = 12_345_678_901
    epoch = index.epoch(position)
    assert index.first_sample(epoch) <= position < index.first_sample(epoch + 1)
    assert epoch == position * 1000 // 197
    assert len(index.read(position)) == 1001


class TestCache:
    """Orders kept in files, here of corpora made to look large."""

    @pytest.fixture(autouse=True)
    def cache_everything(self, monkeypatch):
        monkeypatch.setattr(index_cache, "_MIN_CACHED_ENTRIES", 1)

    def test_second_process_reads_what_the_first_built(self, tmp_path, monkeypatch):
        dataset = corpus(tmp_path, random_lengths(50, 1, 20))
        built = read_all(SampleIndex(dataset, 8, 1, tmp_path / "cache"), 30)
        monkeypatch.setattr(sample_index, "permutation", None)  # building again would fail
        np.testing.assert_array_equal(read_all(SampleIndex(dataset, 8, 1, tmp_path / "cache"), 30), built)

    def test_cached_order_equals_the_one_in_memory(self, tmp_path, monkeypatch):
        dataset = corpus(tmp_path, random_lengths(50, 1, 20))
        cached = read_all(SampleIndex(dataset, 8, 1, tmp_path / "cache"), 150)
        monkeypatch.setattr(index_cache, "_MIN_CACHED_ENTRIES", 1 << 60)
        np.testing.assert_array_equal(read_all(SampleIndex(dataset, 8, 1), 150), cached)

    def test_replaced_data_is_not_served_with_the_old_index(self, tmp_path, monkeypatch):
        """Same path, same number of documents and tokens, other lengths."""
        old = corpus(tmp_path, [3, 9, 4, 8])
        read_all(SampleIndex(old, 4, 1, tmp_path / "cache"), 6)
        new = corpus(tmp_path, [9, 3, 8, 4])
        served = read_all(SampleIndex(new, 4, 1, tmp_path / "cache"), 6)
        monkeypatch.setattr(index_cache, "_MIN_CACHED_ENTRIES", 1 << 60)
        np.testing.assert_array_equal(served, read_all(SampleIndex(new, 4, 1), 6))

    def test_key_follows_content_seed_and_length(self, tmp_path):
        dataset = corpus(tmp_path, [3, 9, 4, 8])

        def num_files():
            return len(list((tmp_path / "cache").glob("*.npy")))

        SampleIndex(dataset, 4, 1, tmp_path / "cache").read(0)
        first = num_files()
        SampleIndex(dataset, 4, 1, tmp_path / "cache").read(0)
        assert num_files() == first
        SampleIndex(dataset, 5, 1, tmp_path / "cache").read(0)
        assert num_files() == first + 1  # documents do not depend on seq_len
        SampleIndex(dataset, 4, 2, tmp_path / "cache").read(0)
        assert num_files() == 2 * first + 1
        os.utime(bin_path(dataset.prefix), ns=(1, 1))
        SampleIndex(dataset, 4, 1, tmp_path / "cache").read(0)
        assert num_files() == 3 * first + 1

    def test_damaged_cache_file_is_built_again(self, tmp_path):
        dataset = corpus(tmp_path, random_lengths(50, 1, 20))
        built = read_all(SampleIndex(dataset, 8, 1, tmp_path / "cache"), 30)
        for number, path in enumerate((tmp_path / "cache").glob("*.npy")):
            path.write_bytes([b"", b"not an array", path.read_bytes()[:-9]][number % 3])
        np.testing.assert_array_equal(read_all(SampleIndex(dataset, 8, 1, tmp_path / "cache"), 30), built)

    def test_what_a_killed_process_left_is_removed(self, tmp_path):
        dataset = corpus(tmp_path, random_lengths(50, 1, 20))
        served = read_all(SampleIndex(dataset, 8, 1, tmp_path / "cache"), 30)
        arrays = sorted((tmp_path / "cache").glob("*.npy"))
        left = [path.rename(path.with_name(f".{path.name}.0123456789ab.tmp")) for path in arrays]
        np.testing.assert_array_equal(read_all(SampleIndex(dataset, 8, 1, tmp_path / "cache"), 30), served)
        assert sorted((tmp_path / "cache").glob("*.npy")) == arrays and not any(path.exists() for path in left)

    def test_unwritable_cache_falls_back_to_memory(self, tmp_path):
        dataset = corpus(tmp_path, random_lengths(50, 1, 20))
        (tmp_path / "file").write_text("no folder can be made here")
        served = read_all(SampleIndex(dataset, 8, 1, tmp_path / "file" / "cache"), 30)
        np.testing.assert_array_equal(served, read_all(SampleIndex(dataset, 8, 1, tmp_path / "cache"), 30))


def test_ids_of_data_that_nothing_vouches_for_are_looked_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(index_cache, "_BLOCK_TOKENS", 7)
    dataset = write_pair(tmp_path / "x", numbered_documents([5, 30, 15]))
    cache = index_cache.ArrayCache(dataset, tmp_path / "cache")
    index_cache.check_ids(dataset, 50, cache)
    with pytest.raises(InputError, match=r"x holds the token id 49, outside the vocabulary of 49: another tokenizer made it"):
        index_cache.check_ids(dataset, 49, cache)
    monkeypatch.setattr(index_cache, "_range_of_ids", None)  # from here on the answer comes from the disk
    index_cache.check_ids(dataset, 50, cache)
    monkeypatch.undo()
    with pytest.raises(InputError, match="negative holds the token id -1"):
        negative = write_pair(tmp_path / "negative", [[3, -1, 2]], np.int32)
        index_cache.check_ids(negative, 50, index_cache.ArrayCache(negative, tmp_path / "cache"))
