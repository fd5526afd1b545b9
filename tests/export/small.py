"""Small students with parameters that hide no fault, as the trainer would have left them, and what transformers makes of them."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megahedge.checkpoint.store import CheckpointWriter
from megahedge.config.mixer import STEP_AXES, MixerConfig
from megahedge.config.model import ModelConfig
from megahedge.data.meta import tokenizer_digest
from megahedge.export.configuration_hedge_mamba import HedgeMambaConfig
from megahedge.export.modeling_hedge_mamba import HedgeMambaForCausalLM
from megahedge.export.to_hf import ExportOptions, export, hf_config
from megahedge.models.families import FAMILIES
from megahedge.models.hf_weights import save_pretrained
from megahedge.models.language_model import LanguageModel
from megahedge.utils.files import write_json
from tests.evaluation.small import byte_tokenizer
from tests.models.small import randomize, small_config

VOCAB_SIZE = 261
"""Four rows more than the tokenizer has tokens, as published models have."""
STEP = 7

MIXERS = {
    "stage1-paper": MixerConfig(kind="hedgehog"),
    "stage1-tuned": MixerConfig(kind="hedgehog", feature_map_per_head=True, rope="before"),
    "paper": MixerConfig(kind="hedge_mamba"),
    "tuned": MixerConfig(
        kind="hedge_mamba", feature_map_per_head=True, rope="before", decay="head", decay_step="head", decay_per_head=True
    ),
    "state": MixerConfig(kind="hedge_mamba", rope="before", decay="state", decay_step="state", conv_kernel=2, gate=False, bypass=True),
    "baseline": MixerConfig(kind="hedge_mamba", decay="none", decay_step="none", conv_kernel=0, gate=False, feature_map_scale=True),
}
"""One of each structure of decay, and each switch on and off."""

COMBINATIONS = {
    f"{decay}-{step or 'no'}-{'heads' if per_head else 'shared'}-{'tied' if tied else 'free'}": MixerConfig(
        kind="hedge_mamba",
        decay=decay,
        decay_step=step or decay,
        decay_per_head=per_head,
        decay_tie_signs=tied,
        feature_map_per_head=per_head,
        feature_map_scale=tied,
        rope="before" if tied else "after",
        decay_rank=5 if per_head else 0,
        conv_kernel=3 if step else 0,
        bypass=per_head,
    )
    for decay, steps in STEP_AXES.items()
    for step in steps or (None,)
    for per_head in (False, True)
    for tied in (False, True)
}
"""All structures of decay and of its step."""


def student(mixer: MixerConfig, **changes) -> LanguageModel:
    """The trainer's model."""
    return randomize(LanguageModel(small_config(**{"vocab_size": VOCAB_SIZE, "mixer": mixer} | changes))).eval()


def as_transformers(model: LanguageModel) -> HedgeMambaForCausalLM:
    """The same parameters in the exported class, in the same dtype."""
    names = FAMILIES[model.config.family]
    exported = HedgeMambaForCausalLM(HedgeMambaConfig(**hf_config(model.config))).to(model.final_norm.weight.dtype)
    exported.load_state_dict({names.hf_name(name): parameter for name, parameter in model.named_parameters()}, strict=False)
    exported.tie_weights()
    return exported.eval()


def write_teacher(folder: Path) -> Path:
    """A teacher of whom the tokenizer is left."""
    byte_tokenizer().save_pretrained(folder)
    return folder


def record_of(config: ModelConfig, teacher: Path | None) -> dict:
    """What a checkpoint says of its run."""
    return {
        "stage": {"softmax": "pretrain", "hedgehog": "stage1"}.get(config.mixer.kind, "stage2"),
        "model": dataclasses.asdict(config),
        "data": {"tokenizer_digest": tokenizer_digest(byte_tokenizer()), "train": []},
        "origin": {"teacher": teacher and str(teacher), "teacher_revision": None},
        "progress": {"step": STEP, "tokens": 1792},
    }


def write_run(run: Path, model: LanguageModel, teacher: Path | None, **options: Any) -> Path:
    """A run folder with one checkpoint."""
    writer = CheckpointWriter(run / "checkpoints", STEP)
    for name, parameter in model.named_parameters():
        writer.add("parameters", name, parameter)
    record = record_of(model.config, teacher)
    writer.finish(record)
    write_json(run / "run.json", record | {"options": {"dtype": "fp32"} | options})
    return run


def tokens_of(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """[batch, length] ids."""
    return torch.randint(0, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[torch.Tensor], length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [t] of several lengths as one batch and its attention mask; the pads are random tokens, so that they show if they are read."""
    length = length or max(map(len, rows))
    batch, mask = tokens_of(length, len(rows), seed=9), torch.zeros(len(rows), length, dtype=torch.int64)
    for index, row in enumerate(rows):
        batch[index, length - len(row) :], mask[index, length - len(row) :] = row, 1
    return batch, mask


def export_of(root, tmp_path, name="tuned", **options):
    """Export a run below `root` to `out` below tmp_path."""
    return export(ExportOptions(**{"run": str(root / name), "out": str(tmp_path / "out")} | options))


def swap_heads(name, tensor):
    """A tensor with the first two heads of one layer swapped."""
    if name == "blocks.1.mixer.qkv_proj.weight":
        heads = tensor.unflatten(0, (4, -1))
        return heads[[1, 0, 2, 3]].flatten(0, 1)
    return tensor


def with_faulty_tensors(fault):
    """A save_pretrained that passes every tensor through `fault(name, tensor)`."""

    def save(tensors, *arguments, **keywords):
        save_pretrained(((name, fault(name, tensor).contiguous()) for name, tensor in tensors), *arguments, **keywords)

    return save
