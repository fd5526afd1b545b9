"""Preprocessing: the tokens of each document with EOD, stable splits, one output for any number of workers, every bad input one line."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from data_helpers import write_jsonl, write_pair

from megahedge.data import cutting
from megahedge.data import preprocess as preprocess_module
from megahedge.data.indexed_dataset import IndexedDataset
from megahedge.data.meta import check_tokenizer, dataset_digest, find_split, load_meta, tokenizer_digest, tokens_per_document
from megahedge.data.preprocess import PreprocessConfig, load_tokenizer, preprocess
from megahedge.utils.errors import InputError

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = [f"Document {index}: the quick brown fox — número {index * 7919} jumps over {'lazy ' * (index % 9)}dogs." for index in range(300)]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    """A byte-level BPE made by tools/train_tokenizer.py."""
    folder = tmp_path_factory.mktemp("tokenizer")
    source = write_jsonl(folder / "text.jsonl", TEXTS)
    run_tool("train_tokenizer.py", "--input", source, "--output_dir", folder / "model", "--vocab_size", 300)
    return str(folder / "model")


def run_tool(name, *arguments, check=True):
    command = [sys.executable, str(REPOSITORY / "tools" / name), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, check=check, capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture
def convert(tmp_path, tokenizer_dir):
    """Preprocess one input into tmp_path/out; options by name."""

    def run(source, **options):
        options = {"output_prefix": str(tmp_path / "out"), "tokenizer": tokenizer_dir, "workers": 1, "val_fraction": 0.0} | options
        inputs = source if isinstance(source, tuple) else (str(source),)
        return preprocess(PreprocessConfig(input=inputs, **options))

    return run


def decoded(prefix, tokenizer_dir):
    dataset, tokenizer = IndexedDataset(prefix), load_tokenizer(tokenizer_dir)
    return [tokenizer.decode(dataset[index]) for index in range(len(dataset))]


def final_files(folder):
    """Everything of the dataset `out`, locks and temporary files included."""
    return sorted(path.name for path in folder.iterdir() if path.name.lstrip(".").startswith("out"))


def test_documents_come_back_with_eod_and_meta_counts_them(tmp_path, convert, tokenizer_dir):
    meta = convert(write_jsonl(tmp_path / "a.jsonl", TEXTS), val_fraction=0.1)
    train, val = decoded(tmp_path / "out_train", tokenizer_dir), decoded(tmp_path / "out_val", tokenizer_dir)
    assert sorted(train + val) == sorted(text + "<|endoftext|>" for text in TEXTS)
    assert 10 <= len(val) <= 55  # 30 expected, five standard deviations of 5.2 either way
    assert load_meta(tmp_path / "out_train") == load_meta(tmp_path / "out") == meta
    tokens = {split: IndexedDataset(tmp_path / f"out_{split}").num_tokens for split in ("train", "val")}
    assert {split: counts.tokens for split, counts in meta.splits.items()} == tokens
    assert sum(counts.text_bytes for counts in meta.splits.values()) == sum(len(text.encode()) for text in TEXTS)
    assert sum(counts.words for counts in meta.splits.values()) == sum(len(text.split()) for text in TEXTS)
    assert (meta.vocab_size, meta.eod_id) == (300, 0)


def test_output_is_the_same_for_any_number_of_workers(tmp_path, convert, monkeypatch):
    monkeypatch.setattr(cutting, "_CHUNK_BYTES", 1000)  # many chunks
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    contents = []
    for workers in (1, 2, 3):
        convert(source, workers=workers, val_fraction=0.1, overwrite=workers > 1)
        contents.append({name: (tmp_path / name).read_bytes() for name in final_files(tmp_path)})
    assert len(contents[0]) == 5
    assert contents[0] == contents[1] == contents[2]


def test_more_data_never_moves_a_document_and_copies_share_a_side(tmp_path, convert, tokenizer_dir):
    convert(write_jsonl(tmp_path / "a.jsonl", TEXTS[:100]), val_fraction=0.3)
    before = {split: decoded(tmp_path / f"out_{split}", tokenizer_dir) for split in ("train", "val")}
    convert(write_jsonl(tmp_path / "b.jsonl", TEXTS[200:] + TEXTS), val_fraction=0.3, overwrite=True)
    after = {split: decoded(tmp_path / f"out_{split}", tokenizer_dir) for split in ("train", "val")}
    assert set(before["train"]) <= set(after["train"]) and set(before["val"]) <= set(after["val"])
    assert not set(after["train"]) & set(after["val"])
    convert(tmp_path / "b.jsonl", val_fraction=0.3, seed=5, overwrite=True)
    assert set(decoded(tmp_path / "out_val", tokenizer_dir)) != set(after["val"])


def test_every_kind_of_input_gives_the_same_tokens(tmp_path, convert):
    datasets = pytest.importorskip("datasets")
    plain = write_jsonl(tmp_path / "plain.jsonl", TEXTS[:50])
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder" / "1.jsonl", TEXTS[:20])
    (tmp_path / "folder" / "2.jsonl.gz").write_bytes(gzip.compress(write_jsonl(tmp_path / "rest", TEXTS[20:50]).read_bytes()))
    (tmp_path / "whole.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "misnamed.jsonl").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "windows.jsonl").write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n"))
    (tmp_path / "no_end.jsonl").write_bytes(plain.read_bytes().rstrip(b"\n"))
    datasets.Dataset.from_dict({"text": TEXTS[:50], "id": list(range(50))}).save_to_disk(tmp_path / "saved")
    two_members = gzip.compress(plain.read_bytes()[:1000]) + gzip.compress(plain.read_bytes()[1000:])
    (tmp_path / "members.jsonl.gz").write_bytes(two_members)
    convert(plain)
    expected = (tmp_path / "out_train.bin").read_bytes(), (tmp_path / "out_train.idx").read_bytes()
    names = ("folder", "folder/*.jsonl*", "whole.jsonl.gz", "misnamed.jsonl", "windows.jsonl", "no_end.jsonl", "saved", "members.jsonl.gz")
    for name in names:
        convert(tmp_path / name, overwrite=True)
        assert ((tmp_path / "out_train.bin").read_bytes(), (tmp_path / "out_train.idx").read_bytes()) == expected, name


def test_empty_documents_are_left_out_wherever_they_are(tmp_path, convert, tokenizer_dir):
    meta = convert(write_jsonl(tmp_path / "a.jsonl", ["", "one", " \n\t", "two", ""]))
    assert decoded(tmp_path / "out_train", tokenizer_dir) == ["one<|endoftext|>", "two<|endoftext|>"]
    assert meta.skipped == {"empty": 3}


GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        (b'{"text": "cut of\n', "invalid_json", "not JSON"),
        (b"plain words\n", "invalid_json", "not JSON"),
        (b'["text"]\n', "invalid_json", "a JSON list"),
        (b'{"text": "\xff\xfe"}\n', "invalid_utf8", "invalid UTF-8 at byte 11"),
        (b'{"text": "\\ud800"}\n', "invalid_utf8", "surrogate"),
        (b'{"body": "x", "id": 1}\n', "missing_key", r"no key 'text'.*'body', 'id'"),
        (b'{"text": null}\n', "not_text", "null"),
        (b'{"text": 5}\n', "not_text", "5"),
        (b"[" * 100_000 + b"\n", "invalid_json", "not JSON"),
    ],
)
def test_bad_line_is_named_or_counted(tmp_path, convert, line, reason, message):
    source = tmp_path / "a.jsonl"
    source.write_bytes(GOOD * 2 + line + GOOD)
    with pytest.raises(InputError, match=rf"a\.jsonl:3: .*{message}"):
        convert(source)
    assert final_files(tmp_path) == []
    meta = convert(source, on_bad_line="skip")
    assert meta.skipped == {reason: 1} and meta.splits["train"].documents == 3


def test_line_number_is_right_beyond_the_first_chunk(tmp_path, convert, monkeypatch):
    monkeypatch.setattr(cutting, "_CHUNK_BYTES", 100)
    source = tmp_path / "a.jsonl"
    source.write_bytes(GOOD * 50 + b"\n" + b"broken\n" + GOOD)
    with pytest.raises(InputError, match=r"a\.jsonl:52: "):
        convert(source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "does not exist"),
        ("no/such/place", None, "does not exist"),
        ("*.jsonl", None, "--input=.* matches no file"),
        ("**a/*[.jsonl", None, "--input=.* is no pattern that can be searched"),
        (f"{'n' * 300}.jsonl", None, "does not exist"),
        ("a.csv", b"words", "unknown kind"),
        ("a.jsonl", b"", "no document"),
        ("a.jsonl", b"\n\n", r"no document .*2 empty"),
        ("a.jsonl", b'{"text": ""}\n', "no document"),
        ("a.jsonl.gz", GOOD, "named .gz but is not compressed so"),
        ("a.jsonl.gz", gzip.compress(GOOD * 9999, mtime=0)[:-20], "damaged or cut off"),
        ("a.jsonl.gz", gzip.compress(GOOD * 99, mtime=0)[:-9] + b"\0" * 9, "damaged or cut off"),
        ("folder", "mkdir", "holds no file"),
    ],
)
def test_unusable_input_is_refused_and_leaves_nothing(tmp_path, convert, name, content, message):
    if content == "mkdir":
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        convert(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert final_files(tmp_path) == []


@pytest.mark.parametrize("inputs", [("",), ()])
def test_empty_input_is_not_the_current_folder(convert, inputs):
    with pytest.raises(InputError, match=r"--input=? is empty"):
        convert(inputs)


def test_existing_output_is_refused_then_replaced(tmp_path, convert, tokenizer_dir):
    convert(write_jsonl(tmp_path / "a.jsonl", ["old"]))
    with pytest.raises(InputError, match="--overwrite"):
        convert(write_jsonl(tmp_path / "b.jsonl", ["new"]))
    assert decoded(tmp_path / "out_train", tokenizer_dir) == ["old<|endoftext|>"]
    convert(tmp_path / "b.jsonl", overwrite=True)
    assert decoded(tmp_path / "out_train", tokenizer_dir) == ["new<|endoftext|>"]


def test_dataset_that_another_process_finishes_meanwhile_is_kept(tmp_path, convert, monkeypatch):
    """It appears after the first look at the output, before this run holds its locks."""

    def slow_load_tokenizer(*arguments, **options):
        write_pair(tmp_path / "out_train", [[1, 2, 3]])
        return load_tokenizer(*arguments, **options)

    monkeypatch.setattr(preprocess_module, "load_tokenizer", slow_load_tokenizer)
    with pytest.raises(InputError, match=r"out_train\.bin exists already"):
        convert(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    assert IndexedDataset(tmp_path / "out_train").num_tokens == 3


@pytest.mark.parametrize(
    "options", [{"val_fraction": 1.5}, {"workers": 0}, {"on_bad_line": "ignore"}, {"seed": -1}, {"tokenizer": "/no/such"}]
)
def test_bad_option_is_refused(tmp_path, convert, options):
    ((name, value),) = options.items()
    with pytest.raises(InputError, match=f"^--{name}={value} "):
        convert(write_jsonl(tmp_path / "a.jsonl", ["x"]), **options)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("", "must end in a name"),
        ("{folder}/", "must end in a name"),
        ("{folder}/..", "must end in a name"),
        ("{folder}/a.jsonl/x", "a.jsonl is not a folder"),
        ("{folder}/" + "n" * 240, "File name too long"),  # a name may have 255 bytes, of which `_train.bin` and a temporary name take some
        ("{folder}/taken", "taken_val.idx is a folder"),
        ("/proc/x", "no such file can be made in /proc"),
    ],
)
def test_output_that_cannot_be_written_is_found_before_the_work(tmp_path, convert, prefix, message):
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "taken_val.idx").mkdir()
    with pytest.raises(InputError, match=f"^--output_prefix=.*{message}"):
        convert(tmp_path / "a.jsonl", output_prefix=prefix.format(folder=tmp_path), overwrite=True, tokenizer="not looked up yet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "taken_val.idx"]


def test_a_text_of_which_the_tokenizer_makes_nothing_is_left_out(tmp_path, convert, tokenizer_dir):
    """It would be a document of nothing but an EOD."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.Replace("nothing", "")
    tokenizer.save_pretrained(tmp_path / "replacing")
    meta = convert(write_jsonl(tmp_path / "a.jsonl", ["one", "nothing", "two"]), tokenizer=str(tmp_path / "replacing"))
    assert meta.skipped == {"no_tokens": 1} and meta.splits["train"].documents == 2


def test_options_that_would_do_nothing_are_refused(tmp_path, convert):
    source = write_jsonl(tmp_path / "a.jsonl", ["one"])
    with pytest.raises(InputError, match=r"--document_separator='--' goes with \.txt files, of which there are none"):
        convert(source, document_separator="--")
    with pytest.raises(InputError, match="--tokenizer_revision=main goes with --tokenizer"):
        convert(source, tokenizer=None, sentencepiece="x.model", tokenizer_revision="main")


def test_percentiles_of_lengths_are_those_of_all_of_them():
    lengths = np.random.default_rng(3).integers(1, 5000, 20_000)
    found = tokens_per_document(np.array_split(lengths, 7))
    expected = np.percentile(lengths, [0, 10, 50, 90, 99, 100], method="inverted_cdf")
    assert list(found.values()) == expected.tolist() and list(found) == ["min", "p10", "p50", "p90", "p99", "max"]
    assert tokens_per_document([]) == {} and tokens_per_document([np.array([5])])["p50"] == 5


def test_dtype_counts_added_tokens(tmp_path, convert):
    """A vocabulary of fewer than 65,536 tokens with one added token above: 32-bit ids, and the id survives."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, 65536)}, "<|endoftext|>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|endoftext|>")
    fast.add_tokens(["extra"])
    fast.save_pretrained(tmp_path / "large")
    convert(write_jsonl(tmp_path / "a.jsonl", ["w1 extra w65535"]), tokenizer=str(tmp_path / "large"))
    dataset = IndexedDataset(tmp_path / "out_train")
    assert dataset.dtype == np.int32 and dataset[0].tolist() == [1, 65536, 65535, 0]


def test_killed_worker_ends_the_run_naming_the_file(tmp_path, tokenizer_dir):
    source = write_jsonl(tmp_path / "big.jsonl", TEXTS * 800)  # some ten seconds of work, so that the kill comes in time
    command = [sys.executable, str(REPOSITORY / "tools" / "preprocess_owt.py"), "--input", str(source), "--workers", "2"]
    command += ["--output_prefix", str(tmp_path / "out"), "--tokenizer", tokenizer_dir]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    try:
        worker = wait_for_worker(run.pid, tmp_path)
        os.kill(worker, signal.SIGKILL)
        killed = time.monotonic()
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 1
    assert "error: a worker process died on" in errors and "big.jsonl" in errors
    assert time.monotonic() - killed < 20
    assert not {"out_train.bin", "out_val.bin", "out.meta.json"} & set(final_files(tmp_path))


def wait_for_worker(pid, folder):
    """The id of a worker process, once the run has written something."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        workers = [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
        partial = folder / ".out_train.bin.tmp"
        if workers and partial.exists() and partial.stat().st_size:
            return int(workers[0])
        time.sleep(0.05)
    raise AssertionError("no worker came up")


def test_command_line_prints_one_line_and_exits_2(tmp_path, tokenizer_dir):
    run = run_tool(
        "preprocess_owt.py", "--input", tmp_path / "x.jsonl", "--output_prefix", tmp_path / "out", "--tokenizer", tokenizer_dir, check=False
    )
    assert run.returncode == 2
    assert (
        run.stderr.splitlines()[-1].startswith(f"error: --input={tmp_path / 'x.jsonl'} does not exist; give ")
        and "Traceback" not in run.stderr
    )


def test_tokenizer_digest_sees_what_a_tokenizer_does_not_how_it_is_stored(tmp_path, tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    digest = tokenizer_digest(tokenizer)
    tokenizer.save_pretrained(tmp_path / "again")
    stored = tmp_path / "again" / "tokenizer.json"
    model = json.loads(stored.read_text())
    model["model"]["vocab"] = dict(reversed(model["model"]["vocab"].items()))
    stored.write_text(json.dumps(model))
    assert stored.read_bytes() != (Path(tokenizer_dir) / "tokenizer.json").read_bytes()
    assert tokenizer_digest(load_tokenizer(str(tmp_path / "again"))) == digest
    tokenizer.add_tokens(["extra"])
    assert tokenizer_digest(tokenizer) != digest
    del model["model"]["merges"][0]
    stored.write_text(json.dumps(model))
    assert tokenizer_digest(load_tokenizer(str(tmp_path / "again"))) != digest  # the same vocabulary, other merges


def test_dataset_of_another_tokenizer_is_refused(tmp_path, convert):
    meta = convert(write_jsonl(tmp_path / "a.jsonl", TEXTS[:5]))
    check_tokenizer(meta, meta.tokenizer_digest, "the teacher")
    with pytest.raises(InputError, match="not with that of the teacher"):
        check_tokenizer(meta, "0" * 64, "the teacher")


def test_split_is_found_or_its_maker_named(tmp_path):
    write_pair(tmp_path / "x_train", [[1, 2]])
    write_pair(tmp_path / "foreign", [[1, 2]])
    with pytest.raises(InputError, match="preprocessing did not finish"):
        find_split(tmp_path / "x", "train")
    assert find_split(tmp_path / "x_train", "train") == str(tmp_path / "x_train")
    (tmp_path / "x.meta.json").write_text("{}")
    assert find_split(tmp_path / "x", "train") == str(tmp_path / "x_train")
    assert find_split(tmp_path / "foreign", "train") == str(tmp_path / "foreign")
    with pytest.raises(InputError, match=r"tools/preprocess_owt\.py"):
        find_split(tmp_path / "y", "train")
    with pytest.raises(InputError, match=r"tools/preprocess_owt\.py"):
        find_split(tmp_path / "x", "val")
    with pytest.raises(InputError, match="without a val split"):
        find_split(tmp_path / "foreign", "val", allow_bare=False)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format_version": 99}', '{"format_version": 1}', '{"format_version": 1, "splits": {"train": 5}}']
)
def test_damaged_meta_is_refused(tmp_path, content):
    (tmp_path / "x.meta.json").write_text(content)
    with pytest.raises(InputError, match=r"x\.meta\.json"):
        load_meta(tmp_path / "x_train")


def test_dataset_digest_follows_the_content(tmp_path):
    write_pair(tmp_path / "x", [[1, 2], [3]])
    first = dataset_digest(IndexedDataset(tmp_path / "x"))
    assert (first["tokens"], first["documents"], first["bin_bytes"]) == (3, 2, 6)
    write_pair(tmp_path / "x", [[1], [2, 3]])
    assert dataset_digest(IndexedDataset(tmp_path / "x"))["idx_sha256"] != first["idx_sha256"]


def test_recall_text_is_seeded_diverse_and_readable(tmp_path, convert):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run_tool("make_recall_text.py", "--output", tmp_path / f"{name}.jsonl.gz", "--num_documents", 200, "--seed", seed)
    run_tool("make_recall_text.py", "--output", tmp_path / "short.jsonl.gz", "--num_documents", 100, "--seed", 1)
    contents = {name: (tmp_path / f"{name}.jsonl.gz").read_bytes() for name in "abc"}
    assert contents["a"] == contents["b"] != contents["c"]
    texts = [json.loads(line)["text"] for line in gzip.decompress(contents["a"]).splitlines()]
    assert all(1000 <= len(text) <= 2000 for text in texts) and len(set(texts)) == 200
    shorter = [json.loads(line)["text"] for line in gzip.decompress((tmp_path / "short.jsonl.gz").read_bytes()).splitlines()]
    assert shorter == texts[:100]
    assert convert(tmp_path / "a.jsonl.gz").splits["train"].documents == 200


def test_recall_text_of_one_kind(tmp_path):
    run_tool("make_recall_text.py", "--output", tmp_path / "cycles.jsonl", "--num_documents", 20, "--kinds", "cycles")
    for line in (tmp_path / "cycles.jsonl").read_text().splitlines():
        words = json.loads(line)["text"].split()
        period = next(period for period in range(1, 7) if words[period:-1] == words[: -1 - period])  # the last word may be cut
        assert 2 <= period <= 6 or len(set(words[:-1])) == 1
    refused = run_tool("make_recall_text.py", "--output", tmp_path / "x.jsonl", "--kinds", "cycles", "circles", check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --kinds=circles is not known; use some of codes ")


def test_dataset_digest_sees_a_change_of_tokens_that_leaves_the_index_equal(tmp_path):
    write_pair(tmp_path / "a", [[1, 2, 3]])
    write_pair(tmp_path / "b", [[1, 2, 4]])
    a, b = (dataset_digest(IndexedDataset(tmp_path / name)) for name in "ab")
    assert a["idx_sha256"] == b["idx_sha256"]
    assert a["bin_blocks_sha256"] != b["bin_blocks_sha256"]
