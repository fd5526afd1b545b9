"""What a rank of a sharded start holds at its peak: its own share of the teacher, and never all of it."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from megahedge.config.options import Stage1Options
from megahedge.models.hf_weights import load_config_file, save_pretrained
from megahedge.models.language_model import LanguageModel
from megahedge.parallel.sharding import named_specs
from megahedge.stages import base
from megahedge.stages.stage1 import stage1
from tests.distributed import run_distributed
from tests.stages.runs import StageRun, make_stage_inputs, stage_options
from tests.training.runs import GLOBAL_BATCH_SIZE, MODEL, SEQ_LEN

LARGE = MODEL | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
TP_SIZE = 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Folder with data, and two teachers: `small` and `large`, whose weights take more than 1 GB."""
    folder = tmp_path_factory.mktemp("loading")
    make_stage_inputs(folder)
    for name, sizes in (("small", MODEL | {"num_attention_heads": 4}), ("large", LARGE)):
        (folder / f"{name}.json").write_text(json.dumps(sizes))
        config = load_config_file(folder / f"{name}.json")
        with torch.device("meta"):
            specs = list(named_specs(LanguageModel(config)))
        generator = torch.Generator().manual_seed(1)
        tensors = ((name, torch.empty(spec.full_shape).normal_(0, 0.02, generator=generator)) for name, spec in specs)
        save_pretrained(tensors, config, folder / name, torch.float32)
        for path in (folder / "tokenizer").iterdir():
            (folder / name / path.name).write_bytes(path.read_bytes())
    return folder


def _peak_of_start(folder: Path) -> int:
    """Bytes of resident memory, pages of mapped files among them, that starting the large teacher's stage 1 adds at its peak."""
    _start(folder, "small")  # so that the baseline has imported and joined everything
    baseline = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    return _start(folder, "large") - baseline


def _start(folder: Path, teacher: str) -> int:
    """Start stage 1; the peak of resident memory so far when it is about to take its first step."""
    changes = {"teacher": teacher, "tp_size": TP_SIZE, "train_tokens": SEQ_LEN * GLOBAL_BATCH_SIZE}
    peaks = []

    def instead_of_training(job, progress):
        peaks.append(_status("VmHWM"))
        return progress

    with mock.patch.object(base, "train", instead_of_training):
        stage1(Stage1Options(**stage_options(folder, StageRun(f"run-{teacher}", 1, "tuned", changes))))
    return peaks[0]


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel keeps no peaks of processes that can be reset")
def test_no_rank_holds_more_than_a_third_of_the_teacher(inputs):
    """A quarter are its weights; the rest are one tensor on its way, and the maps' optimizer."""
    size = sum(path.stat().st_size for path in (inputs / "large").glob("*.safetensors"))
    assert size > 10**9
    peaks = run_distributed(_peak_of_start, TP_SIZE, inputs)
    assert max(peaks) < size / 3, [round(peak / size, 3) for peak in peaks]
