"""Files that are damaged at random: each is read right or ends in one clear error, soon."""

import json
import random
import signal
import struct

import numpy as np
import pytest
from data_helpers import random_lengths, write_pair
from test_preprocess import tokenizer_dir  # noqa: F401 (a fixture)

from megahedge.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megahedge.data.loader import TrainingData, ValidationData
from megahedge.data.preprocess import PreprocessConfig, preprocess
from megahedge.utils.errors import InputError

NUM_PAIRS, NUM_TEXTS = 1000, 200
SECONDS_EACH = 10
HEADER = [(0, 9), (9, 8), (17, 1), (18, 8), (26, 8)]  # offset and size of magic, version, dtype code, sequences, offsets


class TooLongError(Exception):
    """A file kept its reader longer than it may."""


@pytest.fixture
def limited():
    """A function that calls another, for no longer than SECONDS_EACH."""

    def give_up(*_):
        raise TooLongError

    def call(function):
        signal.alarm(SECONDS_EACH)
        try:
            return function()
        finally:
            signal.alarm(0)

    before = signal.signal(signal.SIGALRM, give_up)
    yield call
    signal.signal(signal.SIGALRM, before)


def fuzzed(draw, index, tokens):
    """One damage to a pair's bytes; returns new bytes of both."""
    index, tokens = bytearray(index), bytearray(tokens)
    kind = draw.choice(["header", "header", "number", "bytes", "cut", "longer", "cut tokens", "token"])
    if kind == "header":
        offset, size = draw.choice(HEADER)
        extreme = draw.choice([0, 1, 2**8 - 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, draw.getrandbits(64)])
        index[offset : offset + size] = (extreme % 256**size).to_bytes(size, "little")
    elif kind == "number":  # an entry of sizes, pointers or offsets
        size = draw.choice([4, 8])
        offset = 34 + size * draw.randrange((len(index) - 34) // size)
        value = draw.choice([-1, 0, 1, -(2**31), 2**31 - 1, draw.randrange(-100, 100)])
        index[offset : offset + size] = value.to_bytes(size, "little", signed=True)[:size]
    elif kind == "bytes":
        for _ in range(draw.randrange(1, 9)):
            index[draw.randrange(len(index))] = draw.getrandbits(8)
    elif kind == "cut":
        del index[draw.randrange(len(index)) :]
    elif kind == "longer":
        index += draw.randbytes(draw.randrange(1, 40))
    elif kind == "cut tokens":
        del tokens[draw.randrange(len(tokens)) :]
    else:
        offset = 2 * draw.randrange(len(tokens) // 2)
        tokens[offset : offset + 2] = struct.pack("<H", draw.getrandbits(16))
    return bytes(index), bytes(tokens)


def _serve(prefix, mmap, count):
    """Samples for training, after all of the pair has been cut for validation."""
    list(ValidationData(prefix, 16, vocab_size=1 << 20, mmap=mmap).micro_batches(2))
    data = TrainingData(str(prefix), 16, 7, mmap=mmap)
    return [data.sample(position) for position in range(count)]


@pytest.mark.parametrize("mmap", [True, False])
def test_a_damaged_pair_is_read_right_or_refused(tmp_path, limited, mmap):
    lengths = random_lengths(30, 1, 20, seed=3)
    draw = random.Random(11 + mmap)
    ids = np.random.default_rng(5).integers(0, 1000, sum(lengths))
    write_pair(tmp_path / "x", np.split(ids, np.cumsum(lengths)[:-1]))
    index, tokens = idx_path(tmp_path / "x").read_bytes(), bin_path(tmp_path / "x").read_bytes()
    refused = 0
    for _ in range(NUM_PAIRS // 2):
        new_index, new_tokens = fuzzed(draw, index, tokens)
        idx_path(tmp_path / "x").write_bytes(new_index)
        bin_path(tmp_path / "x").write_bytes(new_tokens)
        try:
            dataset = limited(lambda: IndexedDataset(tmp_path / "x", mmap=mmap))
        except InputError as error:
            refused += 1
            assert "\n" not in str(error) and str(tmp_path) in str(error)
            continue
        # what is accepted is whole: every token of .bin in its order, and every sample can be served
        assert dataset.num_tokens * dataset.dtype.itemsize == len(new_tokens)
        assert b"".join(dataset[number].tobytes() for number in range(len(dataset))) == new_tokens
        whole = np.concatenate([dataset.document(number) for number in range(dataset.num_documents)])
        assert whole.tobytes() == new_tokens
        try:
            served = limited(lambda read=dataset: _serve(tmp_path / "x", mmap, 2 * read.num_tokens // 16))
        except InputError as error:
            assert "\n" not in str(error)
            continue
        assert all(len(sample) == 17 for sample in served)
    assert NUM_PAIRS // 4 < refused < NUM_PAIRS // 2


WRONG_LINES = [b"null", b"[]", b'"text"', b"{}", b'{"text": []}', b'{"text": {}}', b"NaN", b"1e999", b"\0"]


def fuzzed_lines(draw, data):
    """One damage to a file of JSON lines."""
    data = bytearray(data)
    kind = draw.choice(["bytes", "cut", "insert", "line", "doubled", "nested"])
    if kind == "bytes":
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.getrandbits(8)
    elif kind == "cut":
        del data[draw.randrange(len(data)) :]
    elif kind == "insert":
        offset = draw.randrange(len(data))
        data[offset:offset] = draw.randbytes(draw.randrange(1, 30))
    elif kind == "line":
        lines = data.split(b"\n")
        lines[draw.randrange(len(lines))] = draw.choice(WRONG_LINES)
        data = b"\n".join(lines)
    elif kind == "doubled":
        data = data + draw.choice([b"\xef\xbb\xbf", b"\r\n", b"\x1a", b"\xff\xfe"]) + data
    else:
        data += b'{"text": ' * draw.randrange(1, 3000) + b"\n"
    return bytes(data)


@pytest.mark.parametrize("on_bad_line", ["error", "skip"])
def test_damaged_lines_are_counted_or_named(tmp_path, limited, tokenizer_dir, on_bad_line):  # noqa: F811
    texts = [f"Text number {index} — with ünïcode \U0001f642 \n and more" for index in range(12)]
    lines = b"".join(json.dumps({"text": text}, ensure_ascii=index % 2 == 0).encode() + b"\n" for index, text in enumerate(texts))
    draw, outcomes = random.Random(23), []
    for _ in range(NUM_TEXTS // 2):
        (tmp_path / "a.jsonl").write_bytes(fuzzed_lines(draw, lines))
        config = PreprocessConfig(
            output_prefix=str(tmp_path / "out"),
            tokenizer=tokenizer_dir,
            input=(str(tmp_path / "a.jsonl"),),
            workers=1,
            val_fraction=0.3,
            on_bad_line=on_bad_line,
            overwrite=True,
        )
        for path in tmp_path.glob("out*"):
            path.unlink()
        try:
            meta = limited(lambda config=config: preprocess(config))
        except InputError as error:
            outcomes.append("refused")
            assert "\n" not in str(error)
            assert "a.jsonl:" in str(error) or "no document" in str(error)
            assert not list(tmp_path.glob("*out*"))
            continue
        outcomes.append("read")
        found = sum(IndexedDataset(tmp_path / f"out_{split}").num_documents for split in ("train", "val"))
        assert found == sum(counts.documents for counts in meta.splits.values()) >= 1
    # most damage makes a line bad, and some none: a flipped letter of the text is a text
    assert outcomes.count("read") >= (2 if on_bad_line == "error" else NUM_TEXTS // 2 - 5)
    assert on_bad_line == "skip" or outcomes.count("refused") >= NUM_TEXTS // 4
