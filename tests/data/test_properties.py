"""Properties of the sample order for arbitrary corpora: every token of an epoch once, and a fresh reader goes on anywhere."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_helpers import numbered_documents, write_pair

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from megahedge.data.blending import Blend  # noqa: E402
from megahedge.data.indexed_dataset import IndexedDataset  # noqa: E402
from megahedge.data.indexed_writer import IndexedDatasetWriter  # noqa: E402
from megahedge.data.loader import BatchLoader, TrainingData, ValidationData  # noqa: E402
from megahedge.data.sample_index import SampleIndex, permutation  # noqa: E402

# files are written for every example, so no time limit an example; derandomised, so that CI does not depend on chance
properties = settings(max_examples=60, deadline=None, derandomize=True)
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=25)
seeds = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("properties")


def corpus(folder, sizes):
    return write_pair(folder / "x", numbered_documents(sizes), np.int32)


@properties
@given(sizes=lengths, seq_len=st.integers(1, 60), seed=seeds, epochs=st.integers(1, 4))
def test_every_token_of_an_epoch_is_a_target_once(folder, sizes, seq_len, seed, epochs):
    index = SampleIndex(corpus(folder, sizes), seq_len, seed)
    total, count = sum(sizes), index.first_sample(epochs)
    samples = sorted((index.sample_number(position), index.read(position)) for position in range(count))
    assert [number for number, _ in samples] == list(range(count))
    # the stream that the samples are cut from: token 0 of sample 0, then the targets in their order
    stream = np.concatenate([samples[0][1][:1], *(sample[1:] for _, sample in samples)])
    for epoch in range(count * seq_len // total):
        assert sorted(stream[epoch * total : (epoch + 1) * total]) == list(range(total))


@properties
@given(sizes=lengths, seq_len=st.integers(1, 60), seed=seeds, data=st.data())
def test_a_fresh_reader_goes_on_at_any_position(folder, sizes, seq_len, seed, data):
    dataset = corpus(folder, sizes)
    old = SampleIndex(dataset, seq_len, seed)
    positions = data.draw(st.lists(st.integers(0, 10**7), min_size=1, max_size=5))
    before = [old.read(position).tolist() for position in positions]
    after = [SampleIndex(IndexedDataset(folder / "x", mmap=False), seq_len, seed).read(position).tolist() for position in positions]
    assert before == after


@properties
@given(
    sizes=st.lists(lengths, min_size=1, max_size=4),
    weights=st.data(),
    cut=st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 2), (2, 3), (1, 6), (6, 1)]),
    seed=seeds,
)
def test_blended_batches_do_not_depend_on_how_they_are_cut(folder, sizes, weights, cut, seed):
    shares = weights.draw(st.lists(st.sampled_from([1e-3, 0.1, 0.3, 1.0, 7.0, 1e4]), min_size=len(sizes), max_size=len(sizes)))
    words = []
    for number, (lengths_, share) in enumerate(zip(sizes, shares, strict=True)):
        write_pair(folder / f"part{number}", [document + 1000 * number for document in numbered_documents(lengths_)])
        words += [str(share), str(folder / f"part{number}")]
    data = TrainingData(words, seq_len=8, seed=seed)
    micro_batch, ranks = cut
    rows = {}
    for rank in range(ranks):
        loader = BatchLoader(data, global_batch_size=12, micro_batch_size=micro_batch, dp_rank=rank, dp_size=ranks)
        for batch in loader.micro_batches(120):
            rows |= {place: row for place, row in zip(batch.positions, batch.tokens.tolist(), strict=True)}
    assert [rows[place] for place in range(120, 132)] == [data.sample(place)[:-1].tolist() for place in range(120, 132)]
    for position in range(12):  # each row comes from one corpus, and from that the blend says
        assert {token // 1000 for token in data.sample(position).tolist()} == {data.blend.locate(position)[0]}


@properties
@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6), count=st.integers(0, 300))
def test_a_blend_serves_its_shares(weights, count):
    blend = Blend(weights)
    places = [blend.locate(position) for position in range(count)]
    counts = [sum(corpus == number for corpus, _ in places) for number in range(len(weights))]
    assert blend.counts(count) == counts
    assert all(abs(found - share * count) < 1.7 for found, share in zip(counts, blend.shares, strict=True))  # see Blend
    for number in range(len(weights)):
        assert [place for corpus, place in places if corpus == number] == list(range(counts[number]))


@properties
@given(sizes=lengths, seq_len=st.integers(1, 60), micro_batch=st.integers(1, 5), ranks=st.integers(1, 3))
def test_validation_scores_every_token_but_the_first_once(folder, sizes, seq_len, micro_batch, ranks):
    if sum(sizes) < 2:
        return
    corpus(folder, sizes)
    data = ValidationData(folder / "x", seq_len)
    labels = [batch.labels for rank in range(ranks) for batch in data.micro_batches(micro_batch, rank, ranks)]
    scored = sorted(label for part in labels for label in part.flatten().tolist() if label >= 0)
    assert scored == list(range(1, sum(sizes)))


@properties
@given(documents=st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=50), min_size=0, max_size=20), split=st.integers(0, 20))
def test_documents_come_back_whatever_they_are(folder, documents, split):
    with IndexedDatasetWriter(folder / "y", np.uint16) as writer:
        for part in (documents[:split], documents[split:]):
            if part:
                writer.add_documents(np.concatenate(part), np.array([len(document) for document in part]))
        writer.finish()
    for mmap in (True, False):
        dataset = IndexedDataset(folder / "y", mmap=mmap)
        assert [dataset.document(number).tolist() for number in range(dataset.num_documents)] == documents


@properties
@given(length=st.integers(0, 3000), seed=seeds, epoch=st.integers(0, 2**40))
def test_a_permutation_is_one(length, seed, epoch):
    found = permutation(length, seed, epoch, 1)
    assert found.dtype == np.uint64 and sorted(found.tolist()) == list(range(length))


def test_entries_of_equal_high_bits_are_ordered_by_their_whole_hashes(monkeypatch):
    """As if hashes had few bits: the order must be that of the hashes all the same."""
    from megahedge.data import sample_index

    monkeypatch.setattr(sample_index, "_BLOCK", 100)
    key = 12345
    monkeypatch.setattr(sample_index, "_splitmix64", lambda hashes: hashes % np.uint64(2**20))  # far fewer high bits than indices
    order = permutation(1000, 1, 2, 3)
    assert sorted(order.tolist()) == list(range(1000))
    for part in (1, 2, 3):
        key = (key if part != 1 else 0) + part + 1
        key %= 2**20
    hashes = sample_index._hashes(np.arange(1000, dtype=np.uint64), key)
    assert np.all(np.diff(hashes[order].astype(np.int64)) >= 0)


def test_a_fresh_process_serves_the_same_order(tmp_path):
    """From seed and position alone."""
    corpus(tmp_path, [5, 90, 3, 40])
    code = (
        "import sys; from megahedge.data.loader import TrainingData; data = TrainingData(sys.argv[1], 16, 7); "
        "print([data.sample(position).tolist() for position in (0, 3, 10**7)])"
    )
    environment = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], check=True, capture_output=True, text=True, env=environment)
    data = TrainingData(str(tmp_path / "x"), 16, 7)
    assert run.stdout.strip() == str([data.sample(position).tolist() for position in (0, 3, 10**7)])
