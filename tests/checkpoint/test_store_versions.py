"""Checkpoints of other versions, and manifests whose damage is in their shape: told apart, and never a traceback."""

import json

import pytest
import torch

from megahedge.checkpoint.store import MANIFEST, Checkpoint, CheckpointWriter, UnknownFormatError, newest_sound, open_checkpoint
from megahedge.utils.errors import InputError


@pytest.fixture
def root(tmp_path):
    """The checkpoints of a run, at steps 1 and 2, with two groups each."""
    root = tmp_path / "checkpoints"
    for step in (1, 2):
        writer = CheckpointWriter(root, step)
        writer.add("parameters", "a", torch.full((3,), float(step)))
        writer.add("optimizer", "a.exp_avg", torch.zeros(3))
        writer.finish({"progress": {"step": step}})
    return root


@pytest.fixture
def change_manifest(root):
    """A function that applies another to the manifest of step 2."""

    def change(edit):
        path = root / "step-00000002" / MANIFEST
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps(edit(manifest)))

    return change


def test_another_format_is_said_whatever_else_its_manifest_holds(root, change_manifest):
    change_manifest(lambda manifest: {"format": 3, "shards": []})
    for find in (newest_sound, open_checkpoint, lambda root: open_checkpoint(root.parent), lambda root: Checkpoint(root / "step-00000002")):
        with pytest.raises(UnknownFormatError, match="step-00000002 has format 3; this version reads format 1"):
            find(root)


BROKEN = {
    "no files": lambda manifest: manifest | {"files": 7},
    "no table of tensors": lambda manifest: manifest | {"tensors": ["a"]},
    "no table of a group": lambda manifest: manifest | {"tensors": {"parameters": 3}},
    "a list": lambda manifest: [manifest],
    "null": lambda manifest: None,
    "no format": lambda manifest: {key: value for key, value in manifest.items() if key != "format"},
    "no digest": lambda manifest: {key: value for key, value in manifest.items() if key != "sha256"},
    "another step": lambda manifest: manifest | {"step": 5},
}


@pytest.mark.parametrize("groups", [None, ["parameters"]])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_manifest_that_is_not_as_it_was_written_is_passed_over(broken, groups, root, change_manifest):
    change_manifest(BROKEN[broken])
    assert newest_sound(root, groups).step == 1
    with pytest.raises(InputError, match=r"step-00000002.*checkpoint\.json"):
        open_checkpoint(root / "step-00000002", groups)


def test_a_manifest_rewritten_with_the_same_values_is_sound(root, change_manifest):
    """The digest is of the content: white space and the order of keys do not count."""
    change_manifest(lambda manifest: dict(reversed(manifest.items())))
    assert newest_sound(root).step == 2


def test_only_the_groups_that_are_asked_for_are_verified(root):
    (root / "step-00000002" / "optimizer-00000.safetensors").write_bytes(b"")
    assert open_checkpoint(root, ["parameters"]).read("parameters", "a").tolist() == [2.0, 2.0, 2.0]
    assert open_checkpoint(root, ["optimizer"]).step == open_checkpoint(root).step == 1


def test_a_tensor_file_that_is_not_what_the_manifest_says_is_an_input_error(root):
    checkpoint = open_checkpoint(root)
    (checkpoint.path / "parameters-00000.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(InputError, match=r"parameters-00000\.safetensors cannot be read"):
        checkpoint.read("parameters", "a")
    (checkpoint.path / "parameters-00000.safetensors").unlink()
    with pytest.raises(InputError, match=r"parameters-00000\.safetensors cannot be read"):
        checkpoint.read("parameters", "a")
