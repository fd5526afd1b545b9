"""tools/plan.py: what it says of parameters and memory is what a run holds, and what it refuses."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megahedge.config.model import ModelConfig
from megahedge.config.options import plan_batches
from megahedge.config.published import PYTHIA
from megahedge.data.loader import Batch
from megahedge.kernels import chunked
from megahedge.models.families import FAMILIES
from megahedge.models.language_model import LanguageModel
from megahedge.parallel.initialize import initialize_parameters
from megahedge.parallel.topology import TensorParallel
from megahedge.stages import plan as planning
from megahedge.stages.memory import Parameters, Zero, plan_memory
from megahedge.stages.plan import PLANS, teacher_config
from megahedge.stages.step_cost import StepCost, build_on_meta, step_cost
from megahedge.training.distributed import init_distributed
from megahedge.training.engine import TrainingEngine
from megahedge.utils.cli import parse_options
from megahedge.utils.errors import InputError
from tests.distributed import run_distributed
from tests.models.small import random_tokens, randomize, small_config

REPOSITORY = Path(__file__).parents[2]
PUBLISHED_TOTALS = {
    "70m": 70_426_624,
    "160m": 162_322_944,
    "410m": 405_334_016,
    "1b": 1_011_781_632,
    "1.4b": 1_414_647_808,
    "2.8b": 2_775_208_960,
    "6.9b": 6_857_302_016,
    "12b": 11_846_072_320,
}
"""Parameters by size, from the Pythia paper's table (arXiv 2304.01373)."""
GIB = 1 << 30
SMALL_COST = StepCost(kept=5, kept_by_mixers=3, peak=9, head_peak=0, flops=10**12, operations=1)


def options_of(stage: int, *words: str):
    """Options as the command line makes them, with a DeepSpeed file that is there whatever the folder."""
    return parse_options(PLANS[stage], ["--ds_config", str(REPOSITORY / "ds_configs/zero1.json"), *words])


def parameters_of(stage: int, *words: str) -> Parameters:
    options = options_of(stage, *words)
    return Parameters.of(build_on_meta(options.stage_type, options.student_of(teacher_config(options.teacher)), options))


# ---- sizes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", PYTHIA)
def test_pythia_has_as_many_parameters_as_published(size):
    with torch.device("meta"):
        model = LanguageModel(teacher_config(f"pythia-{size}"))
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED_TOTALS[size]


def test_a_teacher_is_a_folder_a_config_file_or_a_name(tmp_path):
    config = small_config()
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["gpt_neox"].hf_config(config)))
    assert teacher_config(str(tmp_path)) == teacher_config(str(tmp_path / "config.json")) == config
    assert teacher_config("EleutherAI/pythia-1b") == teacher_config("pythia-1b") == teacher_config("EleutherAI/pythia-1b-deduped")


def test_stage_1_trains_the_feature_maps_alone_and_holds_no_second_model():
    # two maps a layer with a matrix [64, 64] and a bias; in tuned, of each of 12 heads
    a_map = 64 * 64 + 64
    assert parameters_of(1, "--teacher", "pythia-160m") == Parameters(12 * 2 * a_map, PUBLISHED_TOTALS["160m"], 0)
    tuned = parameters_of(1, "--teacher", "pythia-160m", "--recipe", "tuned")
    assert tuned == Parameters(12 * 12 * 2 * a_map, PUBLISHED_TOTALS["160m"], 0)


def test_stage_2_trains_all_but_the_embeddings_and_holds_a_second_model_for_its_kl():
    embeddings = 2 * 50304 * 768
    without = parameters_of(2, "--teacher", "pythia-160m", "--recipe", "tuned", "--kd_alpha", "0")
    assert without.frozen == embeddings
    assert without.teacher == 0
    gate = 12 * (768 * 768 + 768)
    assert without.trainable > PUBLISHED_TOTALS["160m"] - embeddings + gate
    with_kl = parameters_of(2, "--teacher", "pythia-160m", "--recipe", "tuned")
    assert with_kl == dataclasses.replace(without, teacher=PUBLISHED_TOTALS["160m"] - embeddings)


# ---- the division over ranks ---------------------------------------------------------------------------------------------------


def memory_of(ds_config: str):
    """Memory of stage 2 of pythia-160m on 8 GPUs without counting a step, and its parameters."""
    path = REPOSITORY / "ds_configs" / ds_config
    options = options_of(2, "--teacher", "pythia-160m", "--ds_config", str(path))
    model = options.student_of(teacher_config(options.teacher))
    zero = Zero.of(json.loads(path.read_text()))
    memory = plan_memory(options.stage_type, model, options, zero, plan_batches(options, 8), SMALL_COST)
    return memory, parameters_of(2, "--teacher", "pythia-160m")


def row(memory, name: str) -> int:
    """Bytes of the step of the part that begins with these words."""
    (size,) = (part.step for part in memory.parts if part.name.startswith(name))
    return size


@pytest.mark.parametrize(
    ("ds_config", "parameters", "gradients", "states"),
    [
        ("zero0.json", 4, 4, 8),  # fp32 under autocast; masters are the parameters
        ("zero1.json", 2, 4, 12 / 8),
        ("zero2.json", 2, 4 / 8, 12 / 8),
        ("zero3.json", 2 / 8, 4 / 8, 12 / 8),
    ],
)
def test_each_zero_stage_divides_what_it_divides(ds_config, parameters, gradients, states):
    memory, count = memory_of(ds_config)
    of_student = count.trainable + count.frozen
    # a share may be padded by a number
    assert row(memory, "parameters of the student") == pytest.approx(of_student * parameters, abs=8)
    assert row(memory, "gradients") == pytest.approx(count.trainable * gradients, abs=8)
    assert row(memory, "masters") + row(memory, "moments") == pytest.approx(count.trainable * states, abs=32)


def test_offload_moves_the_optimizer_to_the_host():
    memory, count = memory_of("zero2_offload.json")
    assert row(memory, "masters") == row(memory, "moments") == row(memory, "gradients") == 0
    assert memory.host == pytest.approx(count.trainable * 16 / 8, abs=32)


def test_tensor_parallelism_halves_what_is_sharded():
    whole, half = (parameters_of(2, "--teacher", "pythia-160m", "--tp_size", size) for size in "12")
    assert half.frozen == whole.frozen / 2
    # norms, convolutions and biases of row-parallel maps are whole on each rank: 1 % of this model
    assert half.trainable == pytest.approx(whole.trainable / 2, rel=0.02)


# ---- the cost of a step --------------------------------------------------------------------------------------------------------


def cost_of(*words: str, config=None) -> StepCost:
    options = options_of(2, "--seq_len", "64", "--train_tokens", "1M", "--recipe", "tuned", "--kd_alpha", "0", *words)
    return step_cost(options.stage_type, options.student_of(config or small_config()), options, 2, torch.float32)


def test_checkpointing_keeps_the_input_of_each_block_alone():
    three, two = (cost_of("--activation_checkpointing", config=small_config(num_layers=layers)) for layers in (3, 2))
    assert three.kept - two.kept == 2 * 64 * 64 * 4  # b · t · hidden_size in fp32
    assert three.peak < cost_of(config=small_config(num_layers=3)).peak


def test_operations_are_those_of_all_matrices_forward_and_backward():
    # a block's matrices a token: two operations a weight forward, four backward; the scan's products come on top
    three, two = (cost_of(config=small_config(num_layers=layers)) for layers in (3, 2))
    d, inner = 64, 96
    weights = 3 * d * d + d * d + d * d + 2 * d * inner  # qkv, out, gate, MLP
    by_matrices = 6 * weights * 2 * 64
    assert by_matrices < three.flops - two.flops < 2.5 * by_matrices


def peak_of_records(profiler) -> int:
    """Most bytes alive at one moment, from the records of torch's allocator."""
    records = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(records, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (1, ["--match_inputs", "student"]),
        (1, ["--match_inputs", "teacher", "--match_targets", "mixer"]),
        (2, ["--kd_alpha", "0"]),
        (2, ["--kd_alpha", "0.7"]),
        (2, ["--kd_alpha", "0", "--activation_checkpointing"]),
        (2, ["--kd_alpha", "0", "--decay", "state"]),
    ],
    ids=lambda value: f"stage {value}" if isinstance(value, int) else " ".join(value),
)
def test_a_step_on_the_meta_device_takes_the_bytes_of_a_real_one(stage, words, monkeypatch):
    monkeypatch.setitem(chunked.SEGMENT_ELEMENTS, "cpu", chunked.SEGMENT_ELEMENTS["cuda"])
    options = options_of(stage, "--recipe", "tuned", "--seq_len", "192", "--train_tokens", "1M", *words)
    model = options.student_of(small_config(num_layers=3, max_position_embeddings=192))
    planned = step_cost(options.stage_type, model, options, 2, torch.float32)
    module = options.stage_type(model, TensorParallel(), options)
    for part in filter(None, (module.student, getattr(module, "teacher", None))):
        randomize(part)
    tokens = random_tokens(97, 2, 192)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module(tokens, tokens)[0].backward()
    # kernels of a CPU have scratch of their own, and some ops differ from the GPU's in what they keep
    assert planned.peak == pytest.approx(peak_of_records(profiler), rel=0.1)


# ---- fits or what to change ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cheap_steps(monkeypatch):
    """Steps that take 8 GiB a sequence, a fourth of it with checkpointing, and cost nothing to count."""

    def cost(options, model, micro_batch_size, dtype, zero3):
        size = 8 * GIB * micro_batch_size // options.tp_size // (4 if options.activation_checkpointing else 1)
        return StepCost(size, size, size, 0, 10**12, 100)

    monkeypatch.setattr(planning, "_cost", cost)


def test_a_run_that_does_not_fit_is_told_each_single_change_that_does(cheap_steps):
    options = options_of(2, "--teacher", "pythia-160m", "--gpu", "RTX4090", "--micro_batch_size", "3", "--global_batch_size", "24")
    found = planning.plan(options)
    assert not found.fits
    changes = planning.changes_that_fit(found)
    assert [change.text for change in changes] == ["--activation_checkpointing", "--micro_batch_size 1", "--tp_size 2", "--tp_size 4"]
    assert all(change.plan.fits for change in changes)
    text = "\n".join(planning.report(found, changes))
    assert "does not fit" in text
    assert "would fit with --micro_batch_size 1" in text


def test_days_follow_from_what_is_assumed(cheap_steps):
    options = options_of(2, "--teacher", "pythia-160m", "--num_gpus", "8", "--utilisation", "0.5", "--micro_batch_size", "3")
    found = planning.plan(options)
    # 48 sequences on 8 ranks, 3 at a time: 2 micro-batches of 10¹² operations, at half of the A100's 312 · 10¹² a second
    assert found.days == pytest.approx(180_000 * 2 * 1e12 / (0.5 * 312e12) / 86400)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "abacus"], ["--gpu=abacus is not known", "A100-80G"]),
        (["--teacher", "nowhere"], ["--teacher=nowhere", "1.4b", "a folder"]),
        (["--num_gpus", "0"], ["--num_gpus=0 must be at least 1"]),
        (["--utilisation", "30"], ["--utilisation=30", "at most 1"]),
        (["--tp_size", "3"], ["--tp_size=3 does not divide --num_gpus=8; use 1, 2, 4 or 8"]),
        (["--teacher", "pythia-160m", "--tp_size", "8"], ["--tp_size=8 does not divide num_heads=12"]),
        (["--seq_len", "4096"], ["--seq_len=4096", "max_position_embeddings=2048"]),
        (["--num_gpus", "5"], ["dp_size=5 does not divide --global_batch_size=48"]),
        (["--micro_batch_size", "5"], ["--micro_batch_size=5 does not divide"]),
        (["--reset_at_documents"], ["--reset_at_documents is not planned"]),
        (["--ds_config", "nowhere.json"], ["--ds_config=nowhere.json is not a file"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") and "=" not in value[0] else "",
)
def test_what_cannot_be_planned_is_refused(words, said):
    with pytest.raises(InputError) as caught:
        planning.plan(options_of(2, *words))
    assert all(part in str(caught.value) for part in said)


def test_the_command_prints_a_table_or_json(cheap_steps, monkeypatch, capsys):
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    command = importlib.import_module("plan")
    words = ["plan.py", "--stage", "1", "--teacher", "pythia-160m", "--ds_config", str(REPOSITORY / "ds_configs/zero1.json")]
    monkeypatch.setattr(sys, "argv", words)
    command.main()
    text = capsys.readouterr().out
    assert "stage 1 of pythia-160m, recipe paper, on 8 × A100-80G" in text
    assert "fits: " in text
    monkeypatch.setattr(sys, "argv", [*words, "--json"])
    command.main()
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["steps"] == 20_000
    monkeypatch.setattr(sys, "argv", ["plan.py", "--stage", "3"])
    with pytest.raises(InputError, match="--stage=3 is not known; use 1 or 2"):
        command.main()


# ---- against a run -------------------------------------------------------------------------------------------------------------

MEASURED_MODEL = {"vocab_size": 4096, "hidden_size": 768, "num_layers": 7, "num_heads": 12, "intermediate_size": 3072}
"""56M parameters as a teacher, 61M as a student of stage 2."""
MEASURED = {
    "stage 1": (1, ("--match_inputs", "student")),
    "stage 2": (2, ("--kd_alpha", "0")),
    "stage 2, KL": (2, ("--kd_alpha", "0.7")),
    "stage 2, checkpointing": (2, ("--kd_alpha", "0", "--activation_checkpointing")),
}
"""Settings by name: the stage, and options beside those of `tuned`."""


def measured_model() -> ModelConfig:
    return small_config(**MEASURED_MODEL, max_position_embeddings=256)


def measured_options(setting: str, ds_config: str):
    stage, words = MEASURED[setting]
    batch = ("--micro_batch_size", "1", "--global_batch_size", "2", "--seq_len", "256", "--train_tokens", "1M")
    return options_of(stage, "--recipe", "tuned", "--dtype", "fp32", "--num_gpus", "1", *batch, *words, "--ds_config", ds_config)


def measured_bytes(setting: str, ds_config: str) -> int:
    """Most bytes of tensors at one moment of a real run's first step, the start included."""
    options = measured_options(setting, ds_config)
    chunked.SEGMENT_ELEMENTS["cpu"] = chunked.SEGMENT_ELEMENTS["cuda"]  # as on a GPU, which the plan is for
    model = options.student_of(measured_model())
    batches = plan_batches(options, 1)
    topology = init_distributed(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        stage = options.stage_type(model, topology.tensor_parallel, options)
        for part in filter(None, (stage.student, getattr(stage, "teacher", None))):
            initialize_parameters(part, 0, topology.tensor_parallel)
        engine = TrainingEngine(stage, stage.student, options, batches, topology)
        engine.train_step([_batch(options, index) for index in range(batches.accumulation_steps)], 1e-4)
    return peak_of_records(profiler)


def _batch(options, index: int) -> Batch:
    tokens = torch.randint(0, MEASURED_MODEL["vocab_size"], (1, options.seq_len + 1), generator=torch.Generator().manual_seed(index))
    return Batch(tokens[:, :-1], tokens[:, 1:], (index,))


def measure_all(ds_configs: dict[str, str]) -> dict[str, int]:
    """`measured_bytes` of every setting, one after the other."""
    assert dist.get_world_size() == 1
    return {setting: measured_bytes(setting, ds_config) for setting, ds_config in ds_configs.items()}


@pytest.mark.slow
def test_plan_is_within_15_percent_of_the_bytes_of_a_run(tmp_path):
    ds_configs = {}
    for setting, stage in zip(MEASURED, (1, 0, 1, 0), strict=True):
        path = tmp_path / f"{setting}.json"
        # DeepSpeed's default buffer of 2 GB would hide everything else
        path.write_text(json.dumps({"zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000}}))
        ds_configs[setting] = str(path)
    (measured,) = run_distributed(measure_all, 1, ds_configs, timeout_seconds=1800)
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["gpt_neox"].hf_config(measured_model())))
    for setting, ds_config in ds_configs.items():
        options = dataclasses.replace(measured_options(setting, ds_config), teacher=str(tmp_path))
        planned = planning.plan(options).memory.peak
        print(f"{setting}: planned {planned / GIB:.3f} GiB, measured {measured[setting] / GIB:.3f}, {planned / measured[setting] - 1:+.1%}")
        assert planned == pytest.approx(measured[setting], rel=0.15), setting  # the tolerance that is promised
