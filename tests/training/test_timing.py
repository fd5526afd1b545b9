"""What metrics.jsonl says of speed: where the time of a step went, and how much of the device it used."""

import pytest
import torch

from megahedge.config.options import PretrainOptions
from megahedge.config.published import known_gpu
from megahedge.models.hf_weights import load_config_file
from megahedge.stages.pretrain import Pretrain
from megahedge.stages.step_cost import step_cost
from megahedge.training.metrics import read_metrics
from megahedge.training.timing import OperationCounter, StepTimer
from tests.training.conftest import PEAK_TFLOPS
from tests.training.runs import GLOBAL_BATCH_SIZE, SEQ_LEN, arguments


def train_lines(run) -> list[dict]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]


def step_seconds(line: dict) -> float:
    return SEQ_LEN * GLOBAL_BATCH_SIZE / line["tokens_per_second"]


@pytest.mark.parametrize("name", ["zero1", "zero3-dp2"])
def test_the_parts_of_a_step_make_up_its_time(name, made):
    """Beyond them are the agreement of the ranks and some lines of Python."""
    for line in train_lines(made(name))[1:]:
        parts = [line[f"seconds_{part}"] for part in ("data", "forward", "backward", "optimizer")]
        assert all(part > 0 for part in parts)
        assert 0.5 * step_seconds(line) < sum(parts) < step_seconds(line)
        assert 0 < line["seconds_communication"] < step_seconds(line)
        assert 0 < line["peak_memory_gib"] < 1000


def test_saves_and_evaluations_stand_in_the_line_after_them(made):
    """Step 10 saves and evaluates, and the start evaluates."""
    lines = train_lines(made("zero1"))
    assert [line["step"] for line in lines if "seconds_save" in line] == [11]
    assert [line["step"] for line in lines if "seconds_evaluation" in line] == [1, 11]


def test_lines_of_several_steps_give_the_mean_of_a_step(made):
    lines = train_lines(made("timed"))
    assert [line["step"] for line in lines] == [4, 8, 12, 16, 20]
    for line in lines:
        assert sum(line[f"seconds_{part}"] for part in ("data", "forward", "backward", "optimizer")) < step_seconds(line)
        assert line["mfu"] == pytest.approx(line["tflops"] / PEAK_TFLOPS)


@pytest.mark.parametrize("name", ["timed", "zero1-dp2", "recomputing"])
def test_a_rank_counts_the_operations_that_a_plan_foresees(name, made, inputs):
    """Those of activations that are computed again are not among them."""
    options = PretrainOptions(**arguments(inputs, "run"))
    plan = step_cost(Pretrain, load_config_file(inputs / "model.json"), options, options.micro_batch_size, torch.float32)
    micro_batches = GLOBAL_BATCH_SIZE // options.micro_batch_size // (2 if name.endswith("dp2") else 1)
    for line in train_lines(made(name)):
        assert line["tflops"] * 1e12 * step_seconds(line) == pytest.approx(micro_batches * plan.flops, rel=1e-9)


def test_attention_on_a_cpu_counts_as_on_a_gpu():
    """4 · b · h · t² · d forwards, two and a half times as much backwards."""
    b, h, t, d = 2, 3, 16, 8
    q, k, v = (torch.randn(b, h, t, d, requires_grad=True) for _ in range(3))
    with OperationCounter() as forward:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    with OperationCounter() as backward:
        y.sum().backward()
    assert forward.operations == 4 * b * h * t**2 * d
    assert backward.operations == 10 * b * h * t**2 * d


def test_parts_are_counted_anew_after_they_were_taken():
    timer = StepTimer(torch.device("cpu"))
    with timer.part("forward"), timer.host_part("communication"):
        pass
    taken = timer.take()
    assert list(taken) == ["forward", "communication"] and taken["forward"] >= taken["communication"] > 0
    assert timer.take() == {}


def test_gpus_are_known_by_the_names_of_their_driver():
    assert known_gpu("NVIDIA A100-SXM4-80GB").peak_tflops("bf16") == 312.0
    assert known_gpu("NVIDIA H100 80GB HBM3").peak_tflops("fp32") == 66.9
    assert known_gpu("NVIDIA A10G") is None
