"""Merging equals one build of everything; inspecting says what is there, finds what is wrong, and tells datasets apart."""

from pathlib import Path

import numpy as np
import pytest
from data_helpers import numbered_documents, write_jsonl, write_pair
from test_preprocess import TEXTS, run_tool, tokenizer_dir  # noqa: F401 (a fixture)

from megahedge.data import merge
from megahedge.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megahedge.data.indexed_writer import write_index
from megahedge.data.inspect import InspectConfig, inspect_dataset
from megahedge.data.merge import MergeConfig, merge_datasets
from megahedge.data.meta import load_meta, write_meta, writing_dataset
from megahedge.data.preprocess import PreprocessConfig, preprocess
from megahedge.utils.errors import InputError


@pytest.fixture
def convert(tmp_path, tokenizer_dir):  # noqa: F811
    def run(name, texts, **options):
        source = write_jsonl(tmp_path / f"{name}.jsonl", texts)
        options = {"tokenizer": tokenizer_dir, "workers": 1, "val_fraction": 0.1} | options
        return preprocess(PreprocessConfig(output_prefix=str(tmp_path / name), input=(str(source),), **options))

    return run


@pytest.fixture
def join(tmp_path):
    def run(*names, output="merged", **options):
        merge_datasets(MergeConfig(input=tuple(str(tmp_path / name) for name in names), output_prefix=str(tmp_path / output), **options))

    return run


def files(folder, name):
    return {path.name.removeprefix(name): path.read_bytes() for path in folder.glob(f"{name}[_.]*") if not path.name.endswith(".jsonl")}


def write_sequences(prefix, documents, dtype=np.uint16):
    """A pair whose documents are lists of sequences, as other programs write them."""
    sequences = [sequence for document in documents for sequence in document]
    write_pair(prefix, sequences, dtype)
    sizes = np.array([len(sequence) for sequence in sequences], np.int32)
    offsets = np.cumsum([0] + [len(document) for document in documents])
    with open(idx_path(prefix), "wb") as handle:
        write_index(handle, np.dtype(dtype), len(sizes), lambda: iter([sizes]), len(offsets), [offsets])
    return IndexedDataset(prefix)


def documents(prefix):
    dataset = IndexedDataset(prefix)
    return [dataset.document(number).tolist() for number in range(dataset.num_documents)]


def test_merged_equals_one_build_byte_for_byte(tmp_path, convert, join, tokenizer_dir, monkeypatch):  # noqa: F811
    monkeypatch.setattr(merge, "_BLOCK_TOKENS", 50)
    parts = {"a": TEXTS[:100], "b": TEXTS[100:101], "c": [*TEXTS[101:], ""]}
    for name, texts in parts.items():
        convert(name, texts)
    inputs = tuple(str(tmp_path / f"{name}.jsonl") for name in parts)
    preprocess(PreprocessConfig(output_prefix=str(tmp_path / "all"), input=inputs, tokenizer=tokenizer_dir, workers=1, val_fraction=0.1))
    join(*parts)
    assert files(tmp_path, "merged") == files(tmp_path, "all") and len(files(tmp_path, "all")) == 5


def test_merging_keeps_sequences_documents_and_the_widest_dtype(tmp_path, join):
    first = [[[1, 2], [3]], [], [[4, 5, 6]]]
    second = [[[70000]], [[1], [2], [3]], []]
    write_sequences(tmp_path / "a", first)
    write_sequences(tmp_path / "b", second, np.int32)
    join("a", "b", "a")
    expected = [*first, *second, *first]
    assert documents(tmp_path / "merged") == [[token for sequence in document for token in sequence] for document in expected]
    merged = IndexedDataset(tmp_path / "merged")
    assert merged.dtype == np.int32
    assert [merged[index].tolist() for index in range(len(merged))] == [sequence for document in expected for sequence in document]


def test_bare_pairs_are_merged_only_where_what_is_known_of_them_fits(tmp_path, convert, join):
    convert("a", TEXTS[:50])
    convert("b", TEXTS[50:])
    join("a_train", "b_train", output="bare")
    assert len(documents(tmp_path / "bare")) == len(documents(tmp_path / "a_train")) + len(documents(tmp_path / "b_train"))
    write_meta(tmp_path / "bare", load_meta(tmp_path / "a"))
    with pytest.raises(InputError, match=r"bare\.meta\.json describes other data"):
        join("a_train", "b_train", output="bare", overwrite=True)
    other = load_meta(tmp_path / "b")
    write_meta(tmp_path / "b", type(other)(**(vars(other) | {"tokenizer_digest": "0" * 64})))
    with pytest.raises(InputError, match="the dataset was made with tokenizer"):
        join("a_train", "b_train")


def test_merging_keeps_away_from_what_another_command_is_making(tmp_path, convert, join):
    convert("a", TEXTS[:50])
    convert("b", TEXTS[50:])
    (tmp_path / ".merged.unfinished.json").write_text("{}")
    with pytest.raises(InputError, match=r"\.merged\.unfinished\.json tells of an unfinished preprocessing; choose another"):
        join("a", "b", overwrite=True)
    (tmp_path / ".merged.unfinished.json").unlink()
    with writing_dataset(tmp_path / "merged"), pytest.raises(InputError, match=r"another process is writing .*merged"):
        join("a", "b")
    join("a", "b")


@pytest.mark.parametrize("name", ["x_train", "x_val", ".."])
def test_a_prefix_that_could_not_be_found_again_is_refused(tmp_path, join, name):
    with pytest.raises(InputError, match=r"--output_prefix=.* must (not )?end in"):
        join("a", "b", output=name)
    with pytest.raises(InputError, match=r"--output_prefix=.* must (not )?end in"):
        PreprocessConfig(output_prefix=f"{tmp_path}/{name}", tokenizer="t")


def test_what_does_not_fit_together_is_refused_and_leaves_nothing(tmp_path, convert, join):
    convert("a", TEXTS[:50])
    convert("b", TEXTS[50:], seed=5)
    write_pair(tmp_path / "bare", numbered_documents([3]))
    write_pair(tmp_path / "floats", [[1]])
    data = bytearray(idx_path(tmp_path / "floats").read_bytes())
    data[17] = 8
    cases = [
        (("a", "b"), "--seed was 1234 for .*a, 5 for .*b"),
        (("a", "bare"), "--input=.*bare is one pair without a meta.json"),
        (("a", "nowhere"), "--input=.*nowhere: there is no dataset"),
        (("bare", "nowhere"), "--input=.*nowhere: there is no dataset"),
    ]
    for names, message in cases:
        with pytest.raises(InputError, match=message):
            join(*names)
    with pytest.raises(InputError, match="is one of the inputs"):
        join("a", "b", output="a", overwrite=True)
    with pytest.raises(InputError, match="name at least two datasets"):
        join("a")
    other = load_meta(tmp_path / "b")
    write_meta(tmp_path / "b", type(other)(**(vars(other) | {"tokenizer_digest": "0" * 64})))
    with pytest.raises(InputError, match="the dataset was made with tokenizer"):
        join("a", "b")
    assert not list(tmp_path.glob("*merged*")) and not list(tmp_path.glob(".*"))


def test_commands(tmp_path, convert):
    """As they are typed; a comparison that finds something ends with status 1."""
    convert("a", TEXTS[:150])
    convert("b", TEXTS[150:])
    run_tool("merge_datasets.py", "--input", tmp_path / "a", tmp_path / "b", "--output_prefix", tmp_path / "merged")
    shown = run_tool("inspect_dataset.py", tmp_path / "merged", "--check").stdout
    assert "every token was read" in shown and "tokens a document: min " in shown
    parted = run_tool("inspect_dataset.py", tmp_path / "merged", "--compare", tmp_path / "a", check=False)
    assert parted.returncode == 1 and "num_documents is" in parted.stdout
    missing = run_tool("inspect_dataset.py", tmp_path / "nothing", check=False)
    assert missing.returncode == 2 and missing.stderr.startswith("error: no dataset at")


# ---- inspecting -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [True, False])
def test_a_sound_dataset_is_described(tmp_path, convert, mmap):
    meta = convert("a", TEXTS)
    lines, sound = inspect_dataset(InspectConfig(prefix=str(tmp_path / "a"), check=True, compare=str(tmp_path / "a"), mmap=mmap))
    text = "\n".join(lines)
    assert (
        sound
        and text.count("every token was read, and is the one that was written") == 2
        and "hold the same tokens in the same documents" in text
    )
    for counts in meta.splits.values():
        assert f"{counts.documents} documents in {counts.documents} sequences, {counts.tokens} tokens" in text
        assert f"one in {counts.tokens / counts.documents:.0f} of all {counts.tokens} tokens" in text


def test_a_document_is_printed_as_text(tmp_path, convert):
    convert("a", TEXTS, val_fraction=0.0)

    def shown(number, prefix="a_train"):
        return inspect_dataset(InspectConfig(prefix=str(tmp_path / prefix), document=number))[0][-1]

    assert shown(7) == f"{TEXTS[7]}<|endoftext|>" and shown(-1) == f"{TEXTS[-1]}<|endoftext|>"
    with pytest.raises(InputError, match=r"--document=300: .* has documents 0 to 299"):
        shown(300)
    with pytest.raises(InputError, match="has several pairs; name one of"):
        shown(7, prefix="a")
    write_pair(tmp_path / "bare", [[1]])
    with pytest.raises(InputError, match="give --tokenizer"):
        shown(0, prefix="bare")


def test_faults_are_found(tmp_path, convert):
    meta = convert("a", TEXTS, val_fraction=0.0)
    tokens = np.memmap(bin_path(tmp_path / "a_train"), np.uint16, "r+")
    ends = IndexedDataset(tmp_path / "a_train").document_starts[1:] - 1
    tokens[ends[[3, 8]]] = 5
    tokens[ends[10] + 1] = 60000
    tokens.flush()
    lines, sound = inspect_dataset(InspectConfig(prefix=str(tmp_path / "a_train"), check=True))
    text = "\n".join(lines)
    assert not sound
    assert f"1 ids lie outside the vocabulary of 300, the first at token {ends[10] + 1}, of document 11" in text
    assert "2 documents do not end in EOD: 3, 8" in text
    assert f"298 EOD tokens, where meta.json says {meta.splits['train'].documents}" in text


def test_a_token_that_has_become_another_is_found(tmp_path, convert):
    convert("a", TEXTS)
    tokens = np.memmap(bin_path(tmp_path / "a_train"), np.uint16, "r+")
    tokens[1000] ^= 1
    tokens.flush()
    lines, sound = inspect_dataset(InspectConfig(prefix=str(tmp_path / "a"), check=True))
    assert not sound
    assert [line for line in lines if "is not the file that was written" in line] == [
        f"  {bin_path(tmp_path / 'a_train')} is not the file that was written: its SHA-256 is not that of meta.json"
    ]


def test_a_document_is_not_printed_by_another_tokenizer(tmp_path, convert):
    convert("a", TEXTS)
    teacher = str(Path(__file__).resolve().parents[2] / "scripts" / "quickstart" / "teacher")
    with pytest.raises(InputError, match=r"the dataset .*a_train was made with tokenizer .*, not with that of --tokenizer="):
        inspect_dataset(InspectConfig(prefix=str(tmp_path / "a_train"), document=0, tokenizer=teacher))


def test_a_pair_without_meta_is_read_and_its_ids_told(tmp_path):
    write_pair(tmp_path / "x", numbered_documents([5, 6]))
    lines, sound = inspect_dataset(InspectConfig(prefix=str(tmp_path / "x"), check=True))
    assert sound and lines[-1].endswith("every token was read, and is a number; ids go from 0 to 10")


def test_a_split_that_is_gone_is_a_fault(tmp_path, convert):
    convert("a", TEXTS)
    for path in tmp_path.glob("a_val.*"):
        path.unlink()
    lines, sound = inspect_dataset(InspectConfig(prefix=str(tmp_path / "a"), check=True))
    assert not sound and lines[-1] == f"{tmp_path / 'a'}_val, of which meta.json tells, is not there"


def test_datasets_part_where_they_differ(tmp_path):
    same = numbered_documents([5, 6, 7, 8])
    write_pair(tmp_path / "a", same)
    cases = {
        "content": ([same[0], same[1], same[2] + 1, same[3]], "document 2 is the first"),
        "lengths": ([same[0], same[1][:3], same[1][3:], same[2], same[3]], "document 1 is the first"),
        "shorter": (same[:3], "document 3 is the first"),
        "wider": (same, "has uint16 tokens"),
    }
    for name, (other, message) in cases.items():
        write_pair(tmp_path / name, other, np.int32 if name == "wider" else np.uint16)
        lines, sound = inspect_dataset(InspectConfig(prefix=str(tmp_path / "a"), compare=str(tmp_path / name)))
        assert not sound and any(message in line for line in lines), lines


def test_sequences_and_empty_documents_are_looked_into(tmp_path):
    dataset = write_sequences(tmp_path / "x", [[[1, 2], [3]], [], [[4, 5, 6]], []])
    assert documents(tmp_path / "x") == [[1, 2, 3], [], [4, 5, 6], []]
    assert dataset.document_lengths(0, 4).tolist() == [3, 0, 3, 0]
    assert dataset.documents_begin(0, 6).tolist() == [0, 3] and dataset.documents_begin(1, 2).tolist() == []
    assert dataset.documents_begin(3, 3).tolist() == [0]
    lines, sound = inspect_dataset(InspectConfig(prefix=str(tmp_path / "x"), check=True))
    assert not sound and any("2 documents are empty: 1, 3" in line for line in lines)
