"""The token files: byte layout, both directions of exchange with megatron-core, refusals, atomicity."""

import re
import struct

import numpy as np
import pytest
from data_helpers import full_disk, write_pair

from megahedge.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megahedge.data.indexed_writer import IndexedDatasetWriter, token_dtype
from megahedge.utils.errors import InputError, RunError

DOCUMENTS = [[5, 6, 7, 0], [1, 0], [9, 8, 65535, 2, 0]]


def reference_index(code, itemsize, sizes, document_offsets):
    """The .idx bytes, put together by hand from the layout that megatron-core documents."""
    starts = [itemsize * sum(sizes[:index]) for index in range(len(sizes))]
    parts = [b"MMIDIDX\x00\x00", struct.pack("<Q", 1), struct.pack("<B", code), struct.pack("<QQ", len(sizes), len(document_offsets))]
    parts += [struct.pack(f"<{len(sizes)}i", *sizes), struct.pack(f"<{len(starts)}q", *starts)]
    return b"".join([*parts, struct.pack(f"<{len(document_offsets)}q", *document_offsets)])


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.int32, 4)])
def test_written_bytes_are_megatrons(tmp_path, dtype, code):
    write_pair(tmp_path / "x", DOCUMENTS, dtype)
    assert idx_path(tmp_path / "x").read_bytes() == reference_index(code, np.dtype(dtype).itemsize, [4, 2, 5], [0, 1, 2, 3])
    assert bin_path(tmp_path / "x").read_bytes() == np.concatenate(DOCUMENTS).astype(dtype).tobytes()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_round_trip(tmp_path, dtype):
    dataset = write_pair(tmp_path / "x", DOCUMENTS, dtype)
    assert [dataset[index].tolist() for index in range(len(dataset))] == DOCUMENTS
    assert dataset.read(3, 4).tolist() == [0, 1, 0, 9]
    assert (dataset.num_documents, dataset.num_tokens, dataset.dtype) == (3, 11, dtype)
    assert dataset.document_starts.tolist() == [0, 4, 6, 11]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16])
def test_every_dtype_code_is_read(tmp_path, dtype):
    code = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}[np.dtype(dtype).name]
    idx_path(tmp_path / "x").write_bytes(reference_index(code, np.dtype(dtype).itemsize, [3], [0, 1]))
    bin_path(tmp_path / "x").write_bytes(np.array([1, 2, 3], dtype).tobytes())
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [1, 2, 3]


def test_documents_of_several_sequences_and_empty_ones_are_read(tmp_path):
    idx_path(tmp_path / "x").write_bytes(reference_index(8, 2, [2, 1, 0, 3], [0, 2, 2, 3, 4]))
    bin_path(tmp_path / "x").write_bytes(np.arange(6, dtype=np.uint16).tobytes())
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.document_starts.tolist() == [0, 3, 3, 3, 6]
    assert dataset[3].tolist() == [3, 4, 5]


def test_offsets_beyond_two_gigabytes_are_64_bit(tmp_path):
    """A sparse file of 6 GB: pointers and starts pass 2^31 and 2^32."""
    size, count = 1_500_000_000, 2
    idx_path(tmp_path / "x").write_bytes(reference_index(8, 2, [size] * count, [0, 1, 2]))
    with open(bin_path(tmp_path / "x"), "wb") as handle:
        handle.truncate(2 * size * count)
        handle.seek(2 * (size * count - 1))
        handle.write(struct.pack("<H", 77))
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.num_tokens == 3_000_000_000
    assert dataset[1][-1] == 77
    assert dataset.document_starts.tolist() == [0, size, 2 * size]


def test_writer_index_is_64_bit_beyond_two_gigabytes(tmp_path, monkeypatch):
    """Five documents of 2^30 tokens each, their tokens not written; index blocks of two entries."""
    for module in ("indexed_dataset", "indexed_writer"):
        monkeypatch.setattr(f"megahedge.data.{module}.INDEX_BLOCK", 2)
    writer = IndexedDatasetWriter(tmp_path / "x", np.int32)
    writer._sizes.write(np.full(5, 2**30, np.int32).data)
    writer.num_documents = 5
    writer.finish()
    assert idx_path(tmp_path / "x").read_bytes() == reference_index(4, 4, [2**30] * 5, [0, 1, 2, 3, 4, 5])


def test_foreign_pair_is_read_token_for_token(test_data):
    prefix = test_data / "indexed" / "meg-gpt2-openwebtext_text_document"
    dataset = IndexedDataset(prefix)
    raw = np.frombuffer(bin_path(prefix).read_bytes(), "<u2")
    assert (len(dataset), dataset.num_documents, dataset.num_tokens, dataset.dtype) == (1000, 1000, 1_361_845, np.uint16)
    assert all(dataset[index][-1] == 4999 for index in range(len(dataset)))
    np.testing.assert_array_equal(np.concatenate([dataset[index] for index in range(len(dataset))]), raw)
    np.testing.assert_array_equal(dataset.read(0, dataset.num_tokens), raw)


def test_foreign_pair_is_rewritten_byte_for_byte(test_data, tmp_path):
    prefix = test_data / "indexed" / "meg-gpt2-openwebtext_text_document"
    foreign = IndexedDataset(prefix)
    write_pair(tmp_path / "x", [foreign[index] for index in range(len(foreign))])
    assert idx_path(tmp_path / "x").read_bytes() == idx_path(prefix).read_bytes()
    assert bin_path(tmp_path / "x").read_bytes() == bin_path(prefix).read_bytes()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_core_reads_our_pair(tmp_path, dtype):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    write_pair(tmp_path / "x", DOCUMENTS, dtype)
    theirs = megatron.IndexedDataset(str(tmp_path / "x"))
    assert [theirs[index].tolist() for index in range(len(theirs))] == DOCUMENTS
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]
    assert theirs[0].dtype == dtype


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_read_and_equal_what_megatron_core_writes(tmp_path, dtype):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    torch = pytest.importorskip("torch")
    builder = megatron.IndexedDatasetBuilder(str(bin_path(tmp_path / "theirs")), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(idx_path(tmp_path / "theirs")))
    dataset = IndexedDataset(tmp_path / "theirs")
    assert [dataset[index].tolist() for index in range(len(dataset))] == DOCUMENTS
    write_pair(tmp_path / "ours", DOCUMENTS, dtype)
    for path in (bin_path, idx_path):
        assert path(tmp_path / "ours").read_bytes() == path(tmp_path / "theirs").read_bytes()


def _damage(path, change):
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("which", "change", "message"),
    [
        (idx_path, lambda data: data.__setitem__(slice(0, 9), b"TNTIDX\0\0\0"), "not a Megatron index"),
        (idx_path, lambda data: data.__setitem__(9, 2), "format version 2"),
        (idx_path, lambda data: data.__setitem__(17, 9), "dtype code 9"),
        (idx_path, lambda data: data.__delitem__(slice(20, None)), "truncated"),
        (idx_path, lambda data: data.__delitem__(slice(-1, None)), "truncated"),
        (idx_path, lambda data: data.extend(b"\0"), "too long"),
        (idx_path, lambda data: data.clear(), "truncated"),
        (idx_path, lambda data: data.__setitem__(-8, 2), "document offsets"),
        (idx_path, lambda data: data.__setitem__(34 + 12 + 8, 6), "pointers"),
        (bin_path, lambda data: data.__delitem__(slice(-2, None)), "not of one run"),
        (bin_path, lambda data: data.extend(b"\0\0"), "not of one run"),
    ],
)
def test_damaged_pair_is_refused(tmp_path, which, change, message):
    write_pair(tmp_path / "x", DOCUMENTS)
    _damage(which(tmp_path / "x"), change)
    with pytest.raises(InputError, match=message):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("missing", [bin_path, idx_path])
def test_missing_half_is_refused(tmp_path, missing):
    write_pair(tmp_path / "x", DOCUMENTS)
    missing(tmp_path / "x").unlink()
    with pytest.raises(InputError, match="does not exist"):
        IndexedDataset(tmp_path / "x")


def test_dtype_follows_the_largest_id():
    assert token_dtype(50276) == np.uint16
    assert token_dtype(65535) == np.uint16
    assert token_dtype(65536) == np.int32


def test_id_that_does_not_fit_is_refused(tmp_path):
    for wrong in (65536, -1):
        with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer, pytest.raises(InputError, match="do not fit uint16"):
            writer.add_document([1, wrong])


def test_unfinished_pair_is_absent(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([1, 2])
        assert not bin_path(tmp_path / "x").exists()
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    message = f"cannot write {tmp_path / 'x'}: File too large"
    with full_disk(), pytest.raises(RunError, match=re.escape(message)), IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document(range(10_000))
        writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_failed_rewrite_keeps_the_old_pair(tmp_path):
    write_pair(tmp_path / "x", DOCUMENTS)
    with pytest.raises(RuntimeError), IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([1])
        raise RuntimeError
    assert IndexedDataset(tmp_path / "x").num_tokens == 11


def test_two_writers_of_one_prefix_are_refused(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", np.uint16), pytest.raises(InputError, match="another process is writing"):
        IndexedDatasetWriter(tmp_path / "x", np.uint16)


def test_empty_pair_is_a_pair(tmp_path):
    dataset = write_pair(tmp_path / "x", [])
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (0, 0, 0)
