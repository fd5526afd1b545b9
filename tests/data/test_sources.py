"""Kinds of input: one text, the same tokens, whatever file or archive it lies in; what cannot be read is named."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import tarfile

import pytest
from data_helpers import write_jsonl

from megahedge.data import cutting, sources
from megahedge.data.find_sources import find_sources, iterate_texts
from megahedge.utils.errors import InputError, RunError

pyarrow = pytest.importorskip("pyarrow")
TEXTS = [f"Text {index} — " + "some words\nand a second line " * (index % 5) for index in range(40)]
SEPARATOR = "=== next ==="


def zstd(data):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}
compressed = pytest.mark.parametrize("suffix", COMPRESS)


def tar(files, mode="w"):
    """A tar archive of contents by name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        folder = tarfile.TarInfo("openwebtext")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in files.items():
            member = tarfile.TarInfo(f"openwebtext/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def texts_tar(texts, mode="w"):
    return tar({f"{index:04d}.txt": text.encode() for index, text in enumerate(texts)}, mode)


def lines(texts, key="text"):
    return b"".join(json.dumps({key: text}).encode() + b"\n" for text in texts)


@pytest.fixture(params=[1 << 20, 64])
def chunk_bytes(request, monkeypatch):
    """Chunks of the usual size, and so small ones that every border between them is somewhere within."""
    monkeypatch.setattr(cutting, "_CHUNK_BYTES", request.param)


def read(*paths, **options):
    return list(iterate_texts([str(path) for path in paths], **options))


@compressed
def test_compressed_lines(tmp_path, chunk_bytes, suffix):
    half = len(lines(TEXTS)) // 2
    for name, content in {
        "one": COMPRESS[suffix](lines(TEXTS)),
        "two": COMPRESS[suffix](lines(TEXTS)[:half]) + COMPRESS[suffix](lines(TEXTS)[half:]),  # as when files are put together
    }.items():
        for path in (tmp_path / f"{name}.jsonl{suffix}", tmp_path / f"{name}.jsonl"):  # recognised by its content
            path.write_bytes(content)
            assert read(path) == TEXTS


@pytest.mark.parametrize("suffix", [".xz", ".bz2"])
def test_what_follows_a_stream_is_read_or_missed(tmp_path, suffix):
    """Zeros between streams are padding; anything else that is no stream is damage, and not the end."""
    pack, half = COMPRESS[suffix], len(lines(TEXTS[:20]))
    first, second = pack(lines(TEXTS)[:half]), pack(lines(TEXTS)[half:])
    path = tmp_path / f"a.jsonl{suffix}"
    for content in (first + b"\0" * 4 + second, first + second + b"\0" * 8, first + b"\0" * (1 << 21) + second):
        path.write_bytes(content)
        assert read(path) == TEXTS
    for content in (first + b"rest", first + bytes([second[0] ^ 1]) + second[1:], first + second[:-3]):
        path.write_bytes(content)
        with pytest.raises(InputError, match="is damaged or cut off"):
            read(path)


@compressed
@pytest.mark.parametrize("damage", ["cut", "flipped", "plain"])
def test_damaged_compression_is_named(tmp_path, suffix, damage):
    content = bytearray(COMPRESS[suffix](lines(TEXTS * 50)))
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        for place in range(len(content) // 2, len(content) // 2 + 32):
            content[place] ^= 0xFF
    else:
        content = lines(TEXTS)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(content)
    # in a damaged stream a line may come out wrong before the damage is noticed
    with pytest.raises(InputError, match=r"a\.jsonl\S* is damaged or cut off \(|a\.jsonl\S*:\d+: "):
        read(path)


def test_plain_text_is_one_document_a_file(tmp_path, chunk_bytes):
    for index, text in enumerate(TEXTS):
        (tmp_path / f"{index:03d}.txt").write_text(text)
    (tmp_path / "040.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbflast"))
    assert read(tmp_path) == [*TEXTS, "last"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_plain_text_with_a_line_between_documents(tmp_path, monkeypatch, newline):
    monkeypatch.setattr(cutting, "_CHUNK_BYTES", 64)
    texts = [text.replace("\n", newline) for text in TEXTS]
    (tmp_path / "a.txt").write_bytes(f"{newline}{SEPARATOR}{newline}".join(texts).encode())
    (source,) = find_sources([str(tmp_path / "a.txt")])
    chunks = list(source.chunks(sources.Reading(document_separator=SEPARATOR)))
    assert len(chunks) > 5
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + f"{SEPARATOR}{newline}one".encode())  # a mark is no part of the first line
    (marked,) = find_sources([str(tmp_path / "b.txt")])
    pieces = [text for chunk in marked.chunks(sources.Reading(document_separator=SEPARATOR)) for _, text in chunk.documents("text")]
    assert [text for text in pieces if isinstance(text, str)] == ["one"]
    found = [document for chunk in chunks for document in chunk.documents("text")]
    assert [text for _, text in found] == texts
    assert found[7][0] == f"{tmp_path / 'a.txt'}, document 8"


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_archives_of_texts(tmp_path, chunk_bytes, mode):
    path = tmp_path / f"a.tar{mode[1:].replace(':', '.')}"
    path.write_bytes(texts_tar(TEXTS, mode))
    assert read(path) == TEXTS


def test_openwebtext_as_it_is_published(tmp_path, chunk_bytes):
    """A tar of .xz files, each of them a tar of texts; also unpacked once."""
    subsets = {f"urlsf_subset00-{part}_data.xz": texts_tar(TEXTS[10 * part : 10 * part + 10], "w:xz") for part in range(4)}
    (tmp_path / "openwebtext.tar").write_bytes(tar(subsets))
    (tmp_path / "openwebtext.tar.xz").write_bytes(tar(subsets, "w:xz"))
    folder = tmp_path / "unpacked"
    folder.mkdir()
    for name, content in subsets.items():
        (folder / name).write_bytes(content)
    for path in (tmp_path / "openwebtext.tar", tmp_path / "openwebtext.tar.xz", folder, folder / "*_data.xz"):
        assert read(path) == TEXTS


def test_texts_in_archives_are_named(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar({"good.txt": b"good", "inner.xz": tar({"bad.txt": b"\xff"}, "w:xz")}))
    with pytest.raises(InputError, match=r"a\.tar/openwebtext/inner\.xz/openwebtext/bad\.txt: invalid UTF-8 at byte 1"):
        read(tmp_path / "a.tar")
    broken = bytearray(tar({"inner.xz": lzma.compress(b"x" * 999)}))
    broken[broken.index(lzma.compress(b"x")[:6]) + 12] ^= 0xFF
    (tmp_path / "b.tar").write_bytes(broken)
    with pytest.raises(InputError, match=r"b\.tar/openwebtext/inner\.xz: "):
        read(tmp_path / "b.tar")
    for size in (700, 5000, 5120):  # within a document, within a header, between two members
        (tmp_path / "c.tar").write_bytes(texts_tar(TEXTS)[:size])
        with pytest.raises(InputError, match=r"c\.tar is damaged or cut off \("):
            read(tmp_path / "c.tar")
    (tmp_path / "d.xz").write_bytes(lzma.compress(b"words"))
    with pytest.raises(InputError, match=r"d\.xz: no tar archive; plain text ends in \.txt"):
        read(tmp_path / "d.xz")


def test_archives_of_json_lines_and_of_other_files(tmp_path):
    files = {"a.jsonl": lines(TEXTS[:9]), "b.jsonl.zst": zstd(lines(TEXTS[9:])), "._c.txt": b"of a file manager", ".DS_Store": b"\0"}
    (tmp_path / "a.tar").write_bytes(tar(files))
    assert read(tmp_path / "a.tar") == TEXTS
    (tmp_path / "b.tar").write_bytes(tar({"README": b"a text", "c.parquet": b"PAR1"}))
    with pytest.raises(InputError, match=r"b\.tar/openwebtext/c\.parquet: files in archives are texts"):
        read(tmp_path / "b.tar")
    (tmp_path / "c.tar").write_bytes(tar({"a.jsonl": b"broken\n"}))
    with pytest.raises(InputError, match=r"c\.tar/openwebtext/a\.jsonl:1: not JSON"):
        read(tmp_path / "c.tar")


def test_archives_that_were_put_together_are_read_whole(tmp_path):
    (tmp_path / "a.tar").write_bytes(texts_tar(TEXTS[:20]) + texts_tar(TEXTS[20:]))
    assert read(tmp_path / "a.tar") == TEXTS


def test_words_that_look_like_a_compression_are_words(tmp_path):
    for index, text in enumerate(("BZhang wrote this", "BZh9 is a name", "\x1f\x8b")):
        (tmp_path / f"{index}.txt").write_text(text)
        assert read(tmp_path / f"{index}.txt") == [text]


def test_a_file_is_recorded_whole(tmp_path):
    """Also where its reader stops before its end, as at an archive's end mark."""
    for name, content in {"a.tar": texts_tar(TEXTS) + b"\0" * 3_000_000, "b.jsonl.gz": gzip.compress(lines(TEXTS))}.items():
        (tmp_path / name).write_bytes(content)
        (source,) = find_sources([str(tmp_path / name)])
        assert len(list(source.chunks(sources.Reading()))) == 1
        assert source.record() == {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


class Stream:
    """A stand-in for the hub's client and its streams."""

    def __init__(self, monkeypatch, rows, sha="abc"):
        self.asked = []
        info = lambda self_, name: type("Info", (), {"sha": sha})  # noqa: E731
        monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
        monkeypatch.setattr("datasets.load_dataset", lambda name, **options: self.asked.append((name, options)) or rows)


def test_a_hub_dataset_is_read_at_the_commit_that_it_has(monkeypatch):
    stream = Stream(monkeypatch, [{"text": text, "meta": {"body": "x"}} for text in TEXTS])
    (source,) = find_sources(["someone/text"])
    assert source.identity() == ["someone/text", "abc"]
    assert [text for chunk in source.chunks(sources.Reading()) for _, text in chunk.documents("text")] == TEXTS
    assert stream.asked == [("someone/text", {"split": "train", "streaming": True, "revision": "abc"})]
    assert source.record() == {"name": "text", "hub": True, "revision": "abc"}
    assert read("someone/text", text_key="meta.body") == ["x"] * len(TEXTS)
    with pytest.raises(InputError, match=r"someone/text has no column 'body': this record has \['meta', 'text'\]"):
        read("someone/text", text_key="body")


def test_a_stream_that_ends_early_is_no_fault_of_the_input(monkeypatch):
    def rows():
        yield {"text": "one"}
        raise ConnectionError("reset by peer")

    Stream(monkeypatch, rows())
    with pytest.raises(RunError, match=r"someone/text: the hub has ended the stream \(reset by peer\)"):
        read("someone/text")


def test_parquet(tmp_path, chunk_bytes):
    from pyarrow import parquet

    table = pyarrow.table({"text": TEXTS, "meta": [{"body": text[::-1]} for text in TEXTS], "id": list(range(40))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    assert read(tmp_path / "a.parquet") == TEXTS
    assert read(tmp_path / "a.parquet", text_key="meta.body") == [text[::-1] for text in TEXTS]
    with pytest.raises(InputError, match=r"a\.parquet has no column 'body'; --text_key can be one of \['text', 'meta', 'id'\]"):
        read(tmp_path / "a.parquet", text_key="body")
    with pytest.raises(InputError, match=r"a\.parquet:1: 'id' is 0, not a text"):
        read(tmp_path / "a.parquet", text_key="id")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(InputError, match=r"b\.parquet cannot be read as parquet: "):
        read(tmp_path / "b.parquet")


def test_texts_of_tables_that_are_no_utf8(tmp_path):
    from pyarrow import parquet

    broken = pyarrow.array([b"good", b"\xff\xfe", None], pyarrow.binary()).view(pyarrow.utf8())
    parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet:2: invalid UTF-8 at byte 1"):
        read(tmp_path / "a.parquet")
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"]), pyarrow.array(["y"])], names=["text", "text"])
    parquet.write_table(table, tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b\.parquet has several columns 'text'"):
        read(tmp_path / "b.parquet")


def test_a_file_counts_once_by_whatever_name(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "link.jsonl").symlink_to(path)
    assert read(path, tmp_path / "link.jsonl", f"{tmp_path}/./a.jsonl") == TEXTS


def test_links_in_folders_are_followed_and_lead_somewhere(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "elsewhere").mkdir()
    write_jsonl(tmp_path / "elsewhere" / "b.jsonl", TEXTS[:3])
    (tmp_path / "folder" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder" / "again").symlink_to(tmp_path / "folder")
    assert read(tmp_path / "folder") == TEXTS[:3]
    (tmp_path / "folder" / "broken.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"broken\.jsonl leads nowhere"):
        read(tmp_path / "folder")


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match=r"a\.jsonl is no ordinary file"):
        read(tmp_path / "a.jsonl")


def test_a_table_that_changes_while_it_is_read_is_refused(tmp_path):
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    (source,) = find_sources([str(path)])
    os.utime(path, (1, 1))
    with pytest.raises(InputError, match=r"a\.parquet has changed while it was read"):
        list(source.chunks(sources.Reading()))


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cutting, "_CHUNK_BYTES", 64)
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (source,) = find_sources([str(path)])
    chunks = source.chunks(sources.Reading())
    next(chunks)
    with open(path, "ab") as handle:
        handle.write(lines(["more"]))
    with pytest.raises(InputError, match=r"a\.jsonl has changed while it was read"):
        list(chunks)


def test_saved_dataset_with_nested_columns(tmp_path):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": TEXTS, "meta": [{"body": text[::-1]} for text in TEXTS]})
    dataset.save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == TEXTS
    assert read(tmp_path / "saved", text_key="meta.body") == [text[::-1] for text in TEXTS]
    with pytest.raises(InputError, match=r"has no column 'meta\.words'; --text_key can be one of \['text', 'meta'\]"):
        read(tmp_path / "saved", text_key="meta.words")


def test_nested_keys(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"meta": {"body": "nested"}}\n{"meta.body": "flat", "meta": {"body": "other"}}\n{"meta": {"words": "x"}}\n')
    with pytest.raises(InputError, match=r"a\.jsonl:3: no key 'meta\.body'; 'meta' has \['words'\] \(see --text_key\)"):
        read(path, text_key="meta.body")
    path.write_text("\n".join(path.read_text().splitlines()[:2]))
    assert read(path, text_key="meta.body") == ["nested", "flat"]


def test_a_folder_holds_files_of_one_kind(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / ".hidden.txt").write_text("y")
    (tmp_path / ".checkpoints").mkdir()
    write_jsonl(tmp_path / ".checkpoints" / "a.jsonl", ["a copy"])
    write_jsonl(tmp_path / ".b.jsonl", ["a copy"])
    assert read(f"{tmp_path}/*.jsonl") == read(f"{tmp_path}/**/*.jsonl") == ["x"]
    (tmp_path / "notes.md").write_text("y")
    assert read(tmp_path) == ["x"]
    (tmp_path / "LICENSE.txt").write_text("y")
    with pytest.raises(InputError, match=r"holds files of several kinds, LICENSE\.txt and a\.jsonl among them; give a glob"):
        read(tmp_path)


def test_splits_that_are_left_out_are_told(tmp_path, caplog):
    datasets = pytest.importorskip("datasets")
    splits = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in (("train", ["a", "b"]), ("validation", ["c"]))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    with caplog.at_level("INFO", logger="megahedge"):
        assert list(iterate_texts([str(tmp_path / "saved")])) == ["a", "b"]
        assert list(iterate_texts([str(tmp_path / "saved" / "validation")])) == ["c"]
    assert [record.getMessage().partition("saved ")[2] for record in caplog.records] == [
        f"the split train is read; left out: validation (name one, as {tmp_path / 'saved'}/SPLIT)"
    ]


def test_a_text_ends_alike_before_a_separator_and_at_the_end(tmp_path):
    (tmp_path / "a.txt").write_text("one\n---\ntwo\n---\none\n")
    (source,) = find_sources([str(tmp_path / "a.txt")])
    chunks = source.chunks(sources.Reading(document_separator="---"))
    assert [text for chunk in chunks for _, text in chunk.documents("text")] == ["one", "two", "one"]
