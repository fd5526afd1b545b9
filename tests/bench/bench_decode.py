"""Reading a prompt and decoding, one sequence: an exported student against the teacher with transformers' key-value cache.

python -m tests.bench.bench_decode [--contexts 1024 8192 32768 --prefills 1024 8192 16384]
"""

import dataclasses
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from megahedge.config.mixer import MixerConfig
from megahedge.export.configuration_hedge_mamba import HedgeMambaConfig
from megahedge.export.modeling_hedge_mamba import HedgeMambaForCausalLM
from megahedge.export.to_hf import hf_config
from megahedge.models.families import FAMILIES
from megahedge.utils.cli import parse_options, run_main
from megahedge.utils.errors import check_known
from tests.bench.measure import interleaved_seconds, machine, median_ratio, print_table
from tests.bench.shape import ModelShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEACHER = "teacher"
STUDENTS = {
    "head": MixerConfig(kind="hedge_mamba", feature_map_per_head=True, rope="before", decay="head", decay_step="head", decay_per_head=True),
    "channel": MixerConfig(kind="hedge_mamba"),
}
"""By decay: the mixers of the recipes `tuned` and `paper`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchDecodeOptions(ModelShape):
    """tests/bench/bench_decode.py"""

    contexts: tuple[int, ...] = (1024, 8192, 32768)
    """Tokens before those that are decoded."""
    prefills: tuple[int, ...] = (1024, 8192, 16384)
    """Tokens of the prompts that are read."""
    new_tokens: int = 8
    """Tokens that a timed piece of decoding makes."""
    rounds: int = 5
    """Timed rounds, each of which runs everything once."""
    students: tuple[str, ...] = tuple(STUDENTS)
    """Students by their decay: head (the recipe tuned), channel (paper)."""

    def __post_init__(self):
        for name in self.students:
            check_known("students", name, STUDENTS)


def models_of(options: BenchDecodeOptions) -> dict[str, nn.Module]:
    """Teacher and students with random weights."""
    longest = max(*options.contexts, *options.prefills) + options.new_tokens
    models = {TEACHER: AutoModelForCausalLM.from_config(options.transformers_config(longest), attn_implementation="sdpa")}
    config = FAMILIES["gpt_neox"].model_config(options.hf_config(longest))
    for name in options.students:
        models[name] = HedgeMambaForCausalLM(HedgeMambaConfig(**hf_config(config.with_mixer(STUDENTS[name]))))
    return {name: model.to(DEVICE).eval() for name, model in models.items()}


def random_tokens(options: BenchDecodeOptions, count: int) -> Tensor:
    """[1, count]"""
    return torch.randint(0, options.vocab_size, (1, count), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def reader(options: BenchDecodeOptions, model: nn.Module, length: int) -> Callable[[], object]:
    """Reads a prompt into a fresh cache, for the logits of its last token."""
    prompt = random_tokens(options, length)
    return torch.no_grad()(lambda: model(prompt, use_cache=True, logits_to_keep=1))


@torch.no_grad()
def decoder(options: BenchDecodeOptions, model: nn.Module, context: int) -> tuple[Callable[[], object], int]:
    """Decodes some tokens after a context, and the bytes that the cache of the context takes.

    The teacher's keys and values are random, as their values do not matter to the time, and are cut back after each run.
    """
    prompt, token = random_tokens(options, min(context, 1024)), random_tokens(options, 1)
    cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
    if isinstance(cache, DynamicCache):
        missing = context - prompt.shape[1]
        for layer in range(options.num_layers if missing else 0):
            keys = torch.randn(1, options.num_heads, missing, options.hidden_size // options.num_heads, device=DEVICE)
            cache.update(keys, keys.clone(), layer)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    else:
        tensors = [*cache.conv_tails, *(tensor for state in cache.states for tensor in (state.numerator, state.denominator))]
        held = sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @torch.no_grad()
    def work():
        for _ in range(options.new_tokens):
            model(token, past_key_values=cache, use_cache=True)
        if isinstance(cache, DynamicCache):
            cache.crop(-options.new_tokens)

    return work, held


def main() -> None:
    """Entry point."""
    options = parse_options(BenchDecodeOptions, prog="bench_decode.py", description="Prompts and decoding against the teacher.")
    models = models_of(options)
    rows = []
    for length in options.prefills:
        seconds = interleaved_seconds({name: reader(options, model, length) for name, model in models.items()}, options.rounds)
        for name in models:
            faster = median_ratio(seconds[TEACHER], seconds[name])
            rows.append([f"prompt, {name}", length, f"{length / statistics.median(seconds[name]):.0f}", f"{faster:.2f}", "-"])
    for context in options.contexts:
        works = {name: decoder(options, model, context) for name, model in models.items()}
        seconds = interleaved_seconds({name: work for name, (work, _) in works.items()}, options.rounds)
        for name, (_, held) in works.items():
            speed = options.new_tokens / statistics.median(seconds[name])
            faster = median_ratio(seconds[TEACHER], seconds[name])
            rows.append([f"decoding, {name}", context, f"{speed:.1f}", f"{faster:.2f}", f"{held / 2**20:.1f}"])
    print(f"{machine()}; {options}, one sequence, fp32")
    print("Faster: times the teacher's tokens/s.  Held: the cache, keys and values or states.")
    print_table(["what", "context", "tokens/s", "faster", "MiB held"], rows)


if __name__ == "__main__":
    run_main(main)
