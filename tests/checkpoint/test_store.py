"""Checkpoint folders: complete or invisible, and never believed when they have changed."""

import pytest
import torch
from safetensors import safe_open

from megahedge.checkpoint import store
from megahedge.checkpoint.store import (
    MANIFEST,
    CheckpointWriter,
    best_checkpoint,
    complete_checkpoints,
    forget_best_after,
    mark_best,
    newest_sound,
    open_checkpoint,
    remove_unfinished,
    rotate,
)
from megahedge.utils.errors import InputError


def write(root, step, **tensors):
    """A checkpoint with two groups."""
    writer = CheckpointWriter(root, step)
    for name, tensor in (tensors or {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(float(step))}).items():
        writer.add("parameters", name, tensor)
        writer.add("optimizer", f"{name}.exp_avg", tensor * 2)
    return writer.finish({"progress": {"step": step}})


@pytest.fixture
def root(tmp_path):
    """A folder with checkpoints of steps 1, 2 and 3."""
    for step in (1, 2, 3):
        write(tmp_path, step)
    return tmp_path


@pytest.fixture
def warnings(monkeypatch):
    """Messages of the store's warnings; the project's logger does not propagate to pytest's handler."""
    messages = []
    monkeypatch.setattr(store.logger, "warning", lambda text, *values: messages.append(text % values))
    return messages


def test_tensors_come_back_whole_and_in_slices(root):
    checkpoint = open_checkpoint(root)
    assert checkpoint.step == 3
    assert checkpoint.record == {"progress": {"step": 3}}
    assert checkpoint.names("parameters") == ["a", "b"]
    assert checkpoint.names("optimizer") == ["a.exp_avg", "b.exp_avg"]
    assert checkpoint.names("nothing") == []
    assert torch.equal(checkpoint.read("parameters", "a"), torch.arange(6.0).view(2, 3))
    assert torch.equal(checkpoint.read("parameters", "a", (slice(1, 2), slice(0, 2))), torch.tensor([[3.0, 4.0]]))
    assert checkpoint.read("optimizer", "b.exp_avg", ()).item() == 6.0
    with pytest.raises(InputError, match="holds no parameters tensor c"):
        checkpoint.read("parameters", "c")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_kept_bit_for_bit(tmp_path, dtype):
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor[0, 0], tensor[0, 1] = float("nan"), -0.0
    read = write(tmp_path, 1, a=tensor.t()).read("parameters", "a")  # a view that is not contiguous
    assert torch.equal(read.view(torch.uint8), tensor.t().contiguous().view(torch.uint8))


def _truncate(path):
    file = path / "parameters-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))


def _change_the_record(path):
    manifest = path / MANIFEST
    text = manifest.read_text()
    assert '"step": 3\n' in text
    manifest.write_text(text.replace('"step": 3\n', '"step": 4\n'))  # still JSON, of the same length


DAMAGES = {
    "a truncated file": (_truncate, "bytes instead of"),
    "a flipped bit": (lambda path: _flip_a_bit(path / "optimizer-00000.safetensors"), "does not have the digest"),
    "a flipped bit in the manifest": (_change_the_record, "does not have the digest"),
    "a missing file": (lambda path: (path / "optimizer-00000.safetensors").unlink(), "is missing"),
    "a missing manifest": (lambda path: (path / MANIFEST).unlink(), "no readable checkpoint.json"),
    "half a manifest": (lambda path: (path / MANIFEST).write_text('{"format": 1, "step'), "no readable checkpoint.json"),
    "an empty manifest": (lambda path: (path / MANIFEST).write_text("{}"), "no readable checkpoint.json"),
    "an empty folder": (lambda path: [file.unlink() for file in path.iterdir()], "no readable checkpoint.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_in_a_warning_and_the_one_before_is_used(damage, root, warnings):
    spoil, reason = DAMAGES[damage]
    spoil(root / "step-00000003")
    assert newest_sound(root).step == 2
    (message,) = warnings
    assert "step-00000003" in message and reason in message


def test_a_checkpoint_of_a_later_format_is_never_passed_over(root):
    manifest = root / "step-00000003" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(InputError, match="has format 2; this version reads format 1"):
        newest_sound(root)


def test_no_sound_checkpoint_is_none_or_an_error(root, warnings):
    for path in complete_checkpoints(root):
        _truncate(path)
    assert newest_sound(root) is None
    assert len(warnings) == 3
    with pytest.raises(InputError, match="holds no complete checkpoint"):
        open_checkpoint(root)
    with pytest.raises(InputError, match="bytes instead of"):
        open_checkpoint(root / "step-00000001")


def test_a_checkpoint_is_found_from_its_folder_its_root_and_its_run(tmp_path):
    write(tmp_path / "run" / "checkpoints", 5)
    for path in ("run", "run/checkpoints", "run/checkpoints/step-00000005"):
        assert open_checkpoint(tmp_path / path).step == 5


def test_unfinished_checkpoints_are_invisible_and_removed(root):
    writer = CheckpointWriter(root, 4)
    writer.add("parameters", "a", torch.zeros(3))
    writer._flush("parameters")
    (root / ".latest.77.tmp").write_text("step-0")
    assert [path.name for path in complete_checkpoints(root)] == ["step-00000003", "step-00000002", "step-00000001"]
    assert (root / "latest").read_text() == "step-00000003\n"
    remove_unfinished(root)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000001", "step-00000002", "step-00000003"]
    remove_unfinished(root / "nowhere")


def test_an_abandoned_checkpoint_leaves_nothing(root):
    writer = CheckpointWriter(root, 4)
    writer.add("parameters", "a", torch.zeros(3))
    writer.abandon()
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000001", "step-00000002", "step-00000003"]


@pytest.mark.parametrize("failing", ["save_file", "write_json", "fsync_path"])
def test_latest_and_the_older_checkpoints_outlive_a_failed_write(failing, root, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(store, failing, fail)
        with pytest.raises(OSError, match="No space"):
            write(root, 4)
    assert (root / "latest").read_text() == "step-00000003\n"
    assert newest_sound(root).step == 3
    assert write(root, 4).step == newest_sound(root).step == 4  # the next attempt clears what the first left


def test_writing_a_step_again_replaces_it(root):
    write(root, 3, a=torch.full((2,), 7.0))
    checkpoint = newest_sound(root)
    assert (checkpoint.step, checkpoint.names("parameters")) == (3, ["a"])
    assert checkpoint.read("parameters", "a").tolist() == [7.0, 7.0]


def test_rotation_keeps_the_newest(root):
    write(root, 100_000_000)  # a folder name of more digits
    rotate(root, 2, step=100_000_000)
    assert [path.name for path in complete_checkpoints(root)] == ["step-100000000", "step-00000003"]
    assert (root / "latest").read_text() == "step-100000000\n"


def test_rotation_never_removes_the_checkpoint_just_written(root):
    """A run that went back to step 1 because 2 and 3 are damaged must not lose the step that it writes then."""
    for step in (2, 3):
        _truncate(root / f"step-{step:08d}")
    rotate(root, 1, step=1)
    assert newest_sound(root).step == 1


def test_rotation_keeps_the_best(root):
    mark_best(root, 1)
    rotate(root, 1, step=3)
    assert [path.name for path in complete_checkpoints(root)] == ["step-00000003", "step-00000001"]
    assert best_checkpoint(root).name == (root / "best").resolve().name == "step-00000001"
    mark_best(root, 3)
    rotate(root, 1, step=3)
    assert [path.name for path in complete_checkpoints(root)] == ["step-00000003"]


def test_a_run_that_goes_back_behind_its_best_checkpoint_has_none(root):
    mark_best(root, 2)
    forget_best_after(root, 2)
    assert best_checkpoint(root).name == "step-00000002"
    forget_best_after(root, 1)
    assert best_checkpoint(root) is None and not (root / "best").is_symlink()


@pytest.mark.parametrize("target", ["step-00000009", "../elsewhere", "latest"])
def test_a_best_checkpoint_that_is_none_is_not_believed(root, target):
    (root / "best").symlink_to(target)
    assert best_checkpoint(root) is None
    rotate(root, 1, step=3)
    assert [path.name for path in complete_checkpoints(root)] == ["step-00000003"]


def test_large_groups_are_split_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MAX_FILE_BYTES", 100)
    tensors = {f"t{index}": torch.full((20,), float(index)) for index in range(5)}  # 80 bytes each
    checkpoint = write(tmp_path, 1, **tensors)
    files = sorted(path.name for path in checkpoint.path.glob("parameters-*"))
    assert files == [f"parameters-0000{index}.safetensors" for index in range(3)]
    checkpoint.verify()
    assert all(torch.equal(checkpoint.read("parameters", name), tensor) for name, tensor in tensors.items())


def test_files_are_plain_safetensors(root):
    with safe_open(root / "step-00000003" / "parameters-00000.safetensors", framework="pt") as handle:
        assert sorted(handle.keys()) == ["a", "b"]


def test_other_entries_of_the_folder_are_left_alone(root):
    (root / "notes.txt").write_text("mine")
    (root / "step-3").mkdir()
    (root / "step-00000002-backup").mkdir()
    rotate(root, 1, step=3)
    remove_unfinished(root)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "notes.txt", "step-00000002-backup", "step-00000003", "step-3"]
