"""The learning rate as a function of the step, what decays, and the gate of the optimizer."""

import copy
import itertools

import pytest
import torch

from megahedge.config.model import ModelConfig
from megahedge.config.options import OptimOptions
from megahedge.models.language_model import LanguageModel
from megahedge.training.optim import build_optimizer, decays, learning_rate

CONFIG = ModelConfig(vocab_size=11, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=16)
MATRICES = {"mixer.qkv_proj.weight", "mixer.out_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}


def rates(total_steps, **options):
    return [learning_rate(step, total_steps, OptimOptions(**options)) for step in range(1, total_steps + 1)]


def test_rate_rises_from_above_zero_to_the_peak_and_falls_to_the_floor():
    values = rates(200, lr=1e-2, warmup_fraction=0.1, min_lr_ratio=0.1)
    assert values[0] == pytest.approx(1e-2 / 20)
    assert values[19] == 1e-2
    assert values[-1] == pytest.approx(1e-3)
    assert all(before < after for before, after in itertools.pairwise(values[:20]))
    assert all(before > after for before, after in itertools.pairwise(values[19:]))
    assert values[109] == pytest.approx((1e-2 + 1e-3) / 2)  # half-way down, the cosine is at half its height


@pytest.mark.parametrize(("warmup_fraction", "min_lr_ratio"), [(0.0, 0.0), (0.0, 0.1), (0.01, 1.0), (1.0, 0.1)])
@pytest.mark.parametrize("total_steps", [1, 2, 7, 1000])
def test_rate_stays_between_zero_and_the_peak(total_steps, warmup_fraction, min_lr_ratio):
    values = rates(total_steps, lr=1.0, warmup_fraction=warmup_fraction, min_lr_ratio=min_lr_ratio)
    assert all(0.0 <= value <= 1.0 for value in values)
    assert values[0] > 0 or (total_steps == 1 and min_lr_ratio == 0)
    assert values[-1] == pytest.approx(1.0 if warmup_fraction == 1.0 else min_lr_ratio, abs=1e-12)


def test_rate_beyond_the_budget_stays_at_the_floor():
    assert learning_rate(500, 100, OptimOptions(lr=1.0)) == pytest.approx(0.1)


def test_weight_decay_is_for_matrices_only():
    model = LanguageModel(CONFIG)
    decaying = {name for name, parameter in model.named_parameters() if decays(parameter)}
    in_blocks = {f"blocks.{index}.{matrix}" for index in range(2) for matrix in MATRICES}
    assert decaying == in_blocks | {"embedding.weight", "lm_head.weight"}


def test_a_mark_exempts_a_matrix_from_decay():
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    assert decays(parameter)
    parameter.no_weight_decay = True
    assert not decays(parameter)


def test_groups_hold_every_trainable_parameter_once():
    model = LanguageModel(CONFIG)
    model.embedding.weight.requires_grad = False
    optimizer = build_optimizer(model, OptimOptions(weight_decay=0.3))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in trainable}
    assert len(held) == len(trainable)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


def test_a_model_of_matrices_has_one_group():
    optimizer = build_optimizer(torch.nn.Linear(3, 3, bias=False), OptimOptions())
    assert len(optimizer.param_groups) == 1


def test_made_state_is_that_of_torch_and_a_closed_gate_changes_nothing():
    torch.manual_seed(0)
    mine, reference = (torch.nn.Linear(4, 3) for _ in range(2))
    reference.load_state_dict(mine.state_dict())
    options = OptimOptions(lr=0.1)
    gated = build_optimizer(mine, options)
    gated.make_state()
    plain = torch.optim.AdamW(
        [{"params": [reference.weight], "weight_decay": 0.1}, {"params": [reference.bias], "weight_decay": 0.0}], lr=0.1, betas=(0.9, 0.95)
    )
    for step in range(4):
        gradient = torch.randn(3, 4), torch.randn(3)
        for model in (mine, reference):
            model.weight.grad, model.bias.grad = (part.clone() for part in gradient)
        if step == 2:
            before = copy.deepcopy((mine.state_dict(), gated.state_dict()))
            mine.weight.grad[0, 0] = float("nan")
            gated.enabled = False
            gated.step()
            gated.enabled = True
            assert all(torch.equal(value, mine.state_dict()[name]) for name, value in before[0].items())
            assert all(
                torch.equal(value, gated.state_dict()["state"][index][name])
                for index, state in before[1]["state"].items()
                for name, value in state.items()
            )
            mine.weight.grad = gradient[0].clone()
        gated.step()
        plain.step()
    assert torch.equal(mine.weight, reference.weight) and torch.equal(mine.bias, reference.bias)
