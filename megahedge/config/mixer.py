"""Which token mixer a model has, and everything about it that the paper leaves open or that is worth trying."""

import dataclasses
import math
from typing import ClassVar

from megahedge.utils.errors import InputError
from megahedge.utils.words import either

KINDS = ("softmax", "hedgehog", "hedge_mamba", "mamba")
ROPE_PLACES = ("before", "after")
STEP_AXES = {"none": (), "head": ("head",), "state": ("state", "head"), "channel": ("channel", "state")}
"""By structure of the decay λ: what its step Δ may vary over besides the token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """A token mixer; the defaults of the switches are the paper's (Attention to Mamba, Listing 2).

    What a kind has no use for is ignored: softmax attention looks at nothing here, `hedgehog` at the first group only, and `mamba` at
    decay_rank and conv_kernel only.
    """

    FEATURE_MAP_FIELDS: ClassVar[tuple[str, ...]] = ("feature_map_per_head", "feature_map_scale", "rope", "normalizer_eps")

    kind: str = "softmax"
    """softmax: the teacher; hedgehog: stage 1's linear attention; hedge_mamba: stage 2's; mamba: a baseline with nothing of these."""

    feature_map_per_head: bool = False
    """Each head has feature maps of its own instead of sharing the layer's."""
    feature_map_scale: bool = False
    """Divide queries and keys by √head_dim before their feature maps."""
    rope: str = "after"
    """Rotate the feature maps' outputs (after: Listing 2) or their inputs (before: equation 7 on Pythia's rotated q and k)."""
    normalizer_eps: float = 1e-6
    """Least magnitude of the normaliser; only rotated features, which have signs, come near."""

    decay: str = "channel"
    """Structure of the rate λ: none, head (one a head), state (one a feature), channel (one a feature and output channel)."""
    decay_step: str = "channel"
    """What the step Δ varies over besides the token: head, state or channel."""
    decay_per_head: bool = False
    """Each head has λ and Δ of its own instead of sharing the layer's."""
    decay_tie_signs: bool = True
    """A feature and its negative share λ (and Δ where it varies over features)."""
    decay_init: float = 0.0
    """λ's starting value; at 0, what stage 2 starts from is exactly what stage 1 has learnt."""
    decay_rank: int = 0
    """Width between the two maps that make Δ (0: hidden_size / 16, as in Mamba)."""
    conv_kernel: int = 4
    """Taps of the causal convolution on the mixer's input (0: no convolution)."""
    gate: bool = True
    """Multiply the scan's output by SiLU(x W + b)."""
    bypass: bool = False
    """Add x W + b of the layer's input to the scan's output: as many parameters as the gate, without its product."""

    def __post_init__(self):
        _one_of("kind", self.kind, KINDS)
        _one_of("rope", self.rope, ROPE_PLACES)
        _one_of("decay", self.decay, tuple(STEP_AXES))
        if self.decay != "none":
            _one_of("decay_step", self.decay_step, STEP_AXES[self.decay], f" with decay={self.decay}")
        for name in ("decay_rank", "conv_kernel"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise InputError(f"{name}={value!r} must be a whole number of at least 0")
        if not 0 < self.normalizer_eps < math.inf:
            raise InputError(f"normalizer_eps={self.normalizer_eps} must be positive and finite")
        if not 0 <= self.decay_init < math.inf:
            raise InputError(f"decay_init={self.decay_init} must be finite and not negative: a negative rate makes the state grow")

    def as_kind(self, kind: str) -> "MixerConfig":
        """The same options for another kind of mixer."""
        return dataclasses.replace(self, kind=kind)

    def describe(self) -> str:
        """One line for people."""
        if self.kind == "softmax":
            return "softmax attention"
        convolution = [f"convolution of {self.conv_kernel}"] if self.conv_kernel else []
        if self.kind == "mamba":
            return ", ".join([self.kind, "Mamba's own initialisation", *convolution])
        per_head = {True: "a head", False: "shared by the heads"}
        parts = [self.kind, f"feature maps {per_head[self.feature_map_per_head]}", f"RoPE {self.rope} them"]
        if self.kind == "hedge_mamba":
            if self.decay != "none":
                parts.append(f"decay by {self.decay}, step by {self.decay_step}, {per_head[self.decay_per_head]}")
            parts += convolution
            parts += ["bypass"] if self.bypass else []
            parts += ["gate"] if self.gate else []
        return ", ".join(parts)

    def feature_map(self) -> dict:
        """What stage 1 decides and stage 2 must keep."""
        return {name: getattr(self, name) for name in self.FEATURE_MAP_FIELDS}


def _one_of(name: str, value, known: tuple[str, ...], where: str = "") -> None:
    if value not in known:
        raise InputError(f"{name}={value!r} is not known{where}; use {either(known)}")
