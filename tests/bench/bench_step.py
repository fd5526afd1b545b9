"""Steps of both stages against transformers' GPT-NeoX of the same shape: time and peak memory.

python -m tests.bench.bench_step [--seq_len 1024 --hidden_size 768 --num_layers 12]
"""

import dataclasses
import functools
import statistics

import torch
from torch import Tensor

from megahedge.config.model import ModelConfig
from megahedge.config.options import Stage1Options, Stage2Options, read_recipe
from megahedge.models.families import FAMILIES
from megahedge.parallel.initialize import initialize_parameters
from megahedge.parallel.topology import TensorParallel
from megahedge.stages.base import Stage
from megahedge.stages.stage1 import Stage1
from megahedge.stages.stage2 import Stage2
from megahedge.utils.cli import parse_options, run_main
from megahedge.utils.errors import check_known
from tests.bench.measure import Work, interleaved_seconds, machine, median_ratio, peak_bytes, print_table
from tests.bench.shape import ModelShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORWARD, TRAINING = "transformers, forward", "transformers, training"
BASELINES = (FORWARD, TRAINING)
STUDENTS = {
    "stage 1, student-fed": ("stage1", {"match_inputs": "student"}),
    "stage 1, teacher-fed": ("stage1", {"match_inputs": "teacher"}),
    "stage 2, no decay": ("stage2", {"decay": "none", "kd_alpha": 0.0}),
    "stage 2, head": ("stage2", {"decay": "head", "kd_alpha": 0.0}),
    "stage 2, state": ("stage2", {"decay": "state", "kd_alpha": 0.0}),
    "stage 2, channel": ("stage2", {"decay": "channel", "kd_alpha": 0.0}),
    "stage 2, head, KL": ("stage2", {"decay": "head", "kd_alpha": 0.7}),
}
"""By name: the stage, and what differs from the recipe `tuned`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchStepOptions(ModelShape):
    """tests/bench/bench_step.py"""

    batch: int = 1
    """Sequences."""
    seq_len: int = 1024
    """Tokens a sequence."""
    rounds: int = 5
    """Timed rounds, each of which runs everything once."""
    steps: tuple[str, ...] = tuple(STUDENTS)
    """Which steps of ours."""
    memory: bool = True
    """Measure peak memory too."""

    def __post_init__(self):
        for name in self.steps:
            check_known("steps", name, STUDENTS)


def tokens_of(options: BenchStepOptions) -> tuple[Tensor, Tensor]:
    """Tokens and labels, [b, t]."""
    tokens = torch.randint(0, options.vocab_size, (options.batch, options.seq_len + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].to(DEVICE), tokens[:, 1:].to(DEVICE)


def baseline(options: BenchStepOptions, name: str) -> Work:
    """transformers' model, with SDPA and random weights, run once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(options.transformers_config(options.seq_len), attn_implementation="sdpa").to(DEVICE)
    tokens, _ = tokens_of(options)

    def forward():
        with torch.no_grad():
            return model(tokens).logits

    def training():
        model.zero_grad(set_to_none=True)
        model(tokens, labels=tokens).loss.backward()

    work = forward if name == FORWARD else training
    work()
    return work


def student(options: BenchStepOptions, name: str) -> Work:
    """Loss and backward of a stage's module, without DeepSpeed and update, run once."""
    stage_name, changes = STUDENTS[name]
    values = read_recipe("tuned")[stage_name] | {"recipe": "tuned", "train_tokens": 10**9, "dtype": "fp32"} | changes
    config = FAMILIES["gpt_neox"].model_config(options.hf_config(options.seq_len))
    stage = _stage(stage_name, values, config).to(DEVICE)
    for model in filter(None, (stage.student, getattr(stage, "teacher", None))):
        initialize_parameters(model, 0, TensorParallel())
    stage.train()
    tokens, labels = tokens_of(options)

    def work():
        stage.zero_grad(set_to_none=True)
        stage(tokens, labels)[0].backward()

    work()
    return work


def _stage(name: str, values: dict, config: ModelConfig) -> Stage:
    if name == "stage1":
        options = Stage1Options(**values)
        return Stage1(config.with_mixer(options.mixer_config("hedgehog")), TensorParallel(), options)
    options = Stage2Options(**values, stage1_steps=0, teacher="none")
    return Stage2(config.with_mixer(options.mixer_config("hedge_mamba")), TensorParallel(), options)


def work_of(options: BenchStepOptions, name: str) -> Work:
    """The work of that name, run once."""
    return baseline(options, name) if name in BASELINES else student(options, name)


def main() -> None:
    """Entry point."""
    options = parse_options(BenchStepOptions, prog="bench_step.py", description="Steps against transformers' GPT-NeoX.")
    names = [*BASELINES, *options.steps]
    seconds = interleaved_seconds({name: work_of(options, name) for name in names}, options.rounds)
    rows = []
    for name in names:
        row = [name, f"{1e3 * statistics.median(seconds[name]):.0f}"]
        row += [f"{median_ratio(seconds[name], seconds[other]):.2f}" for other in BASELINES]
        if options.memory:
            row.append(f"{peak_bytes(functools.partial(work_of, options, name)) / 2**20:.0f}")
        rows.append(row)
    print(f"{machine()}; {options}, b {options.batch}, t {options.seq_len}, fp32")
    print("Loss and gradients without the update.  Memory: at the peak, beyond weights and gradients.")
    print_table(["step", "ms", "× forward", "× training", *(["MiB"] if options.memory else [])], rows)


if __name__ == "__main__":
    run_main(main)
