"""Our files in megatron-core's hands: the documents that its GPTDataset serves are those that we wrote."""

import numpy as np
import pytest
from data_helpers import numbered_documents, random_lengths, write_pair

SEQ_LEN = 16


@pytest.fixture(scope="module")
def served():
    """A function that opens all of a pair as megatron-core does; importing it takes some seconds."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from tests.bench.bench_data import gpt_dataset

    return lambda prefix: gpt_dataset(str(prefix), SEQ_LEN, None, None)


def test_gpt_dataset_serves_the_documents_that_we_wrote(tmp_path, served):
    lengths = random_lengths(60, 1, 50, seed=4)
    documents = numbered_documents(lengths)
    write_pair(tmp_path / "x", documents, np.int32)
    theirs = served(tmp_path / "x")
    # undo its shuffling of samples, so that they follow one another
    order = np.argsort(theirs.shuffle_index)
    samples = [theirs[int(place)] for place in order]
    stream = np.concatenate([samples[0]["tokens"][:1].numpy(), *(sample["labels"].numpy() for sample in samples)])
    expected = np.concatenate([documents[number] for number in theirs.document_index])
    assert len(expected) - SEQ_LEN <= len(stream) <= len(expected)  # it leaves out what fills no sample
    assert np.array_equal(stream, expected[: len(stream)])


def test_samples_are_the_same_where_the_order_of_documents_is(tmp_path, served):
    """Both cut the stream of documents into samples that share one token with the next."""
    from megahedge.data.sample_index import SampleIndex

    write_pair(tmp_path / "x", numbered_documents(random_lengths(40, 1, 50, seed=5)), np.int32)
    theirs = served(tmp_path / "x")
    from megahedge.data.indexed_dataset import IndexedDataset

    ours = SampleIndex(IndexedDataset(tmp_path / "x"), SEQ_LEN, seed=1)
    order = ours._document_order(0)
    theirs.document_index = order.documents.astype(np.int32)
    lengths = np.diff(order.starts)
    assert theirs.document_index.shape == lengths.shape
    from megatron.core.datasets import helpers

    total = int(lengths.sum())
    theirs.sample_index = helpers.build_sample_idx(theirs.dataset.sequence_lengths, theirs.document_index, SEQ_LEN, 1, total, True, True)
    count = len(theirs.sample_index) - 1
    by_number = {ours.sample_number(position): ours.read(position) for position in range(ours.first_sample(1))}
    theirs.shuffle_index = np.arange(count)
    for number in range(count):
        sample = theirs[number]
        assert np.array_equal(sample["tokens"].numpy(), by_number[number][:-1])
        assert np.array_equal(sample["labels"].numpy(), by_number[number][1:])
    assert count >= 20
