"""The learning rate as a function of the step, what decays, and the gate of the optimizer."""

import copy
import itertools

import pytest
import torch

from megahedge.config.mixer import MixerConfig
from megahedge.config.model import ModelConfig
from megahedge.config.options import OptimOptions
from megahedge.models.handover import added_parameters
from megahedge.models.language_model import LanguageModel
from megahedge.training.optim import GatedAdamW, build_optimizer, decays, learning_rate

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
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.3]
    assert all(group["betas"] == (0.9, 0.95) for group in optimizer.param_groups)


def test_a_model_of_matrices_has_one_group():
    optimizer = build_optimizer(torch.nn.Linear(3, 3, bias=False), OptimOptions())
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("per_head", [False, True])
def test_nothing_that_stage_2_adds_decays_but_the_gate(per_head):
    mixer = MixerConfig(kind="hedge_mamba", feature_map_per_head=per_head, decay_per_head=per_head)
    model = LanguageModel(CONFIG.with_mixer(mixer))
    decaying = {name for name in added_parameters(model.config, "softmax") if decays(model.get_parameter(name))}
    in_a_block = {"gate_proj.weight", "query_map.weight", "key_map.weight"}
    assert decaying == {f"blocks.{index}.mixer.{matrix}" for index in range(2) for matrix in in_a_block}


def test_parameters_are_grouped_by_what_their_makers_declared():
    model = LanguageModel(CONFIG.with_mixer(MixerConfig(kind="hedge_mamba")))
    for name in added_parameters(model.config, "hedgehog"):
        model.get_parameter(name).lr_scale = 10.0
    groups = build_optimizer(model, OptimOptions(weight_decay=0.3)).param_groups
    settings = {(group["weight_decay"], group["lr_scale"], group["lower_bound"]): group["params"] for group in groups}
    assert len(settings) == len(groups)
    assert set(settings) == {(0.3, 1.0, None), (0.0, 1.0, None), (0.3, 10.0, None), (0.0, 10.0, None), (0.0, 10.0, 0.0)}
    held = {key: {id(parameter) for parameter in parameters} for key, parameters in settings.items()}
    assert held[0.3, 10.0, None] == {id(block.mixer.gate_proj.weight) for block in model.blocks}
    assert held[0.0, 10.0, 0.0] == {id(block.mixer.decay.rate.weight) for block in model.blocks}


# ---- values with a lower bound ------------------------------------------------------------------------------------------------------


def bounded(*values: float, **options) -> tuple[torch.nn.Parameter, GatedAdamW]:
    """A parameter that may not fall below 0, and its optimizer."""
    module = torch.nn.Module()
    module.rate = torch.nn.Parameter(torch.tensor(values))
    module.rate.lower_bound = 0.0
    return module.rate, build_optimizer(module, OptimOptions(lr=0.1, **options))


def update(parameter: torch.nn.Parameter, optimizer: GatedAdamW, *gradient: float) -> None:
    parameter.grad = torch.tensor(gradient)
    optimizer.step()


def test_a_value_at_its_bound_stays_there_while_its_gradient_is_positive():
    rate, optimizer = bounded(0.0)
    for _ in range(5):
        update(rate, optimizer, 1.0)
        assert rate.item() == 0.0


def test_a_value_at_its_bound_leaves_it_in_the_first_update_that_a_negative_gradient_wants():
    rate, optimizer = bounded(0.0)
    update(rate, optimizer, -1e-3)
    assert rate.item() == pytest.approx(0.1, rel=1e-4)  # Adam's first update is the rate whatever the gradient's size

    # and so after updates that pushed outward, as soon as Adam's mean has turned: the bound keeps no debt
    held, optimizer = bounded(0.0)
    free = torch.nn.Parameter(torch.zeros(1))
    without_bound = torch.optim.AdamW([free], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for gradient in [1.0] * 3 + [-1.0] * 6:
        before = free.item()
        update(held, optimizer, gradient)
        free.grad = torch.tensor([gradient])
        without_bound.step()
        if free.item() > before:
            assert held.item() > 0.0
            break
    else:
        pytest.fail("the mean of the gradients never turned")
    assert free.item() < 0.0  # where a debt would have held it


def test_no_value_falls_below_its_bound():
    generator = torch.Generator().manual_seed(0)
    rate, optimizer = bounded(*[0.0, 0.01, 0.05, 1.0] * 5)
    lowest, highest = 1.0, 0.0
    for _ in range(50):
        update(rate, optimizer, *torch.randn(20, generator=generator).tolist())
        lowest, highest = min(lowest, rate.min().item()), max(highest, rate.max().item())
    assert lowest == 0.0 and highest > 1.0


def test_a_closed_gate_projects_nothing():
    rate, optimizer = bounded(-0.5, 0.5)
    optimizer.enabled = False
    update(rate, optimizer, -1.0, 1.0)
    assert rate.tolist() == [-0.5, 0.5]
    assert not optimizer.state


def test_values_without_a_bound_may_fall_below_0():
    module = torch.nn.Linear(2, 1)
    module.bias.data.zero_()
    optimizer = build_optimizer(module, OptimOptions(lr=0.1))
    module.weight.grad, module.bias.grad = torch.ones(1, 2), torch.ones(1)
    optimizer.step()
    assert module.bias.item() == pytest.approx(-0.1)


def test_a_bound_keeps_the_moments_as_they_would_be():
    """The projection leaves gradients and moments alone, so nothing depends on how a batch was cut."""
    (held, optimizer), (free, plain) = bounded(0.0), bounded(0.0)
    plain.param_groups[0]["lower_bound"] = None
    for gradient in (1.0, -0.5, 2.0):
        update(held, optimizer, gradient)
        update(free, plain, gradient)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[held][moment], plain.state[free][moment])


def test_a_group_of_scaled_rate_moves_by_its_factor():
    """`lr_scale` is a factor on the learning rate of each step, applied as the engine does."""
    module = torch.nn.Linear(1, 1)
    module.bias.lr_scale = 7.0
    before = [parameter.item() for parameter in (module.weight, module.bias)]
    optimizer = build_optimizer(module, OptimOptions(weight_decay=0.0))
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * group["lr_scale"]
    module.weight.grad, module.bias.grad = torch.ones(1, 1), torch.ones(1)
    optimizer.step()
    moved = [old - parameter.item() for old, parameter in zip(before, (module.weight, module.bias), strict=True)]
    assert moved == pytest.approx([1e-2, 7e-2], rel=1e-4)


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
