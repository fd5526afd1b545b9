"""What a language model is made of, whatever family it comes from."""

import dataclasses
import math

from megahedge.config.mixer import MixerConfig
from megahedge.utils.errors import InputError

ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder-only transformer.  The words are those of Hugging Face's `config.json`."""

    vocab_size: int
    """Rows of the embedding as published; padding for tensor parallelism is internal."""
    hidden_size: int
    """Width of the residual stream."""
    num_layers: int
    """Number of blocks."""
    num_heads: int
    """Heads of each mixer; head_dim is hidden_size / num_heads."""
    intermediate_size: int
    """Width inside the MLP."""
    max_position_embeddings: int = 2048
    """Longest sequence that the teacher was made for, in tokens."""
    family: str = "gpt_neox"
    """Which file of megahedge/models/families reads and writes it."""
    parallel_residual: bool = True
    """x + mixer(norm1(x)) + mlp(norm2(x)) instead of two residual steps."""
    rotary_pct: float = 0.25
    """Share of head_dim that RoPE rotates."""
    rotary_base: float = 10000.0
    """RoPE's base wavelength."""
    activation: str = "gelu"
    """The MLP's non-linearity."""
    attention_bias: bool = True
    """Whether the mixer's projections have biases."""
    norm_eps: float = 1e-5
    """Added to the variance in layer norms."""
    initializer_range: float = 0.02
    """Standard deviation of fresh weights."""
    tie_word_embeddings: bool = False
    """Whether the output embedding is the input embedding."""
    mixer: MixerConfig = dataclasses.field(default_factory=MixerConfig)
    """The token mixer of every block."""

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name}={value!r} must be a whole number of at least 1")
        for name in ("parallel_residual", "attention_bias", "tie_word_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}={getattr(self, name)!r} must be true or false")
        for name, least in (("rotary_pct", 0.0), ("rotary_base", 1.0), ("norm_eps", 0.0), ("initializer_range", 0.0)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value < math.inf:
                raise InputError(f"{name}={value!r} must be a finite number of at least {least:g}")
        if self.norm_eps == 0:
            raise InputError("norm_eps=0 must be positive: a token whose features are all equal would give 0 / 0")
        if self.hidden_size % self.num_heads:
            raise InputError(f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}")
        if self.activation not in ACTIVATIONS:
            raise InputError(f"activation={self.activation!r} is not known; use one of {', '.join(ACTIVATIONS)}")
        if not 0.0 <= self.rotary_pct <= 1.0:
            raise InputError(f"rotary_pct={self.rotary_pct} must lie between 0 and 1")
        if self.rotary_dim % 2:
            raise InputError(
                f"rotary_pct={self.rotary_pct} of head_dim={self.head_dim} rotates {self.rotary_dim} features; the count must be even"
            )

    @classmethod
    def from_record(cls, record: dict) -> "ModelConfig":
        """What `dataclasses.asdict` made of one.  Raises KeyError or TypeError for a record of another version."""
        return cls(**(record | {"mixer": MixerConfig(**record["mixer"])}))

    def with_mixer(self, mixer: MixerConfig) -> "ModelConfig":
        """The same model around another token mixer."""
        return dataclasses.replace(self, mixer=mixer)

    @property
    def head_dim(self) -> int:
        """Features per head."""
        return self.hidden_size // self.num_heads

    @property
    def rotary_dim(self) -> int:
        """Features per head that RoPE rotates."""
        return int(self.head_dim * self.rotary_pct)

    @property
    def residual_std(self) -> float:
        """Standard deviation of fresh weights that write into the residual stream, which sums 2 * num_layers of them (GPT-2's rule)."""
        return self.initializer_range / math.sqrt(2 * self.num_layers)
