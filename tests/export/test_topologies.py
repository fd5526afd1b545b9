"""One set of weights is one export, however the run that saved it was cut over processes."""

import itertools
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from megahedge.config.options import PretrainOptions, plan_batches
from megahedge.export.to_hf import ExportOptions, export
from megahedge.models.language_model import LanguageModel
from megahedge.training.checkpointing import Progress, save_checkpoint
from megahedge.training.distributed import init_distributed
from megahedge.training.engine import TrainingEngine
from tests.distributed import run_distributed
from tests.export.small import MIXERS, STEP, VOCAB_SIZE, record_of, write_teacher
from tests.models.small import randomize, small_config
from tests.training.runs import ds_config

CUTS = {"one": (1, 1, "zero1"), "tp2": (2, 2, "zero1"), "zero3": (2, 1, "zero3"), "zero3_tp2": (2, 2, "zero3")}
"""Number of processes, tp_size, DeepSpeed file."""


class Job(nn.Module):
    """The module that DeepSpeed wraps."""

    def __init__(self, student: LanguageModel):
        super().__init__()
        self.student = student


RECIPES = ("paper", "tuned")
"""Maps, rates and W_d that the heads share, and those that are cut with them."""


def save_cuts(root: Path, names: list[str]) -> None:
    """Checkpoints of the engine of each cut, all of the same parameters; tensor parallelism last, as DeepSpeed remembers an mpu."""
    for name, recipe in itertools.product(names, RECIPES):
        _, tp_size, zero = CUTS[name]
        topology = init_distributed(tp_size)
        student = randomize(LanguageModel(small_config(vocab_size=VOCAB_SIZE, mixer=MIXERS[recipe]), topology.tensor_parallel))
        options = PretrainOptions(
            model_config="none", ds_config=ds_config(zero), dtype="fp32", tp_size=tp_size, global_batch_size=2, seq_len=8
        )
        plan = plan_batches(options, topology.dp_size)
        engine = TrainingEngine(Job(student), student, options, plan, topology)
        record = record_of(student.config, root / "teacher")
        assert save_checkpoint(engine, student, root / recipe / name / "checkpoints", Progress(step=STEP), record, keep_last=1)
        dist.barrier()


@pytest.mark.slow
def test_exports_of_every_cut_are_the_same_bytes(tmp_path):
    write_teacher(tmp_path / "teacher")
    run_distributed(save_cuts, 1, tmp_path, ["one"], timeout_seconds=600)
    run_distributed(save_cuts, 2, tmp_path, ["zero3", "tp2", "zero3_tp2"], timeout_seconds=600)
    for recipe in RECIPES:
        contents = {}
        for name in CUTS:
            run = tmp_path / recipe / name
            folder = export(ExportOptions(run=str(run), out=str(run / "student"))).folder
            contents[name] = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert len(contents["one"]) > 10
        for name, files in contents.items():
            assert files == contents["one"], (recipe, name)
