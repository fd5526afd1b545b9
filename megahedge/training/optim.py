"""AdamW that DeepSpeed wraps, what decays, and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable

import torch

from megahedge.config.options import OptimOptions


class GatedAdamW(torch.optim.AdamW):
    """torch's AdamW with a gate: while `enabled` is false, step() does nothing.

    DeepSpeed owns the gradients and hands this optimizer its fp32 partitions.  A step that must not happen (a non-finite gradient
    anywhere) still has to run DeepSpeed's whole clean-up; closing the gate makes that true for every ZeRO stage alike, with
    parameters, moments and step counts left bit for bit.
    """

    enabled = True

    def step(self, closure=None):
        """One update with the gate open, nothing with it closed."""
        return super().step(closure) if self.enabled else None

    def make_state(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Give `parameters` (by default those of all groups) the state that they would have before their first update."""
        if parameters is None:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in parameters:
            self.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }


def decays(parameter: torch.nn.Parameter) -> bool:
    """Whether weight decay applies: matrices only, and none whose maker set `no_weight_decay` (λ, Δ, conv)."""
    return parameter.ndim >= 2 and not getattr(parameter, "no_weight_decay", False)


def build_optimizer(module: torch.nn.Module, options: OptimOptions) -> GatedAdamW:
    """AdamW over the module's trainable parameters, in a decaying and a non-decaying group."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if decays(parameter)], "weight_decay": options.weight_decay},
        {"params": [parameter for parameter in trainable if not decays(parameter)], "weight_decay": 0.0},
    ]
    return GatedAdamW(
        [group for group in groups if group["params"]],
        lr=options.lr,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
    )


def learning_rate(step: int, total_steps: int, options: OptimOptions) -> float:
    """Rate of the update that ends step `step` (1 … total_steps): linear warm-up from above zero, then cosine to min_lr_ratio · lr."""
    warmup_steps = round(options.warmup_fraction * total_steps)
    if step <= warmup_steps:
        return options.lr * step / warmup_steps
    floor = options.lr * options.min_lr_ratio
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return floor + 0.5 * (options.lr - floor) * (1 + math.cos(math.pi * min(1.0, progress)))
