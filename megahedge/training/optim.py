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

    A group with a `lower_bound` is projected onto it after each update.  That blocks the outward direction only and leaves gradients
    alone, so a value at the bound comes free as soon as its gradient wants it, however the batch was cut between ranks.
    """

    enabled = True

    def step(self, closure=None):
        """One update with the gate open, nothing with it closed."""
        if not self.enabled:
            return None
        loss = super().step(closure)
        for group in self.param_groups:
            if group["lower_bound"] is not None:
                for parameter in group["params"]:
                    parameter.detach().clamp_(min=group["lower_bound"])
        return loss

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
    """AdamW over the module's trainable parameters, grouped by what their makers declared on them.

    `no_weight_decay`; `lr_scale`, a factor on the learning rate; `lower_bound`, the least value.
    """
    groups: dict[tuple, list] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            weight_decay = options.weight_decay if decays(parameter) else 0.0
            settings = (weight_decay, getattr(parameter, "lr_scale", 1.0), getattr(parameter, "lower_bound", None))
            groups.setdefault(settings, []).append(parameter)
    names = ("weight_decay", "lr_scale", "lower_bound")
    return GatedAdamW(
        [{"params": parameters} | dict(zip(names, settings, strict=True)) for settings, parameters in groups.items()],
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
