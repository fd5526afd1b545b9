"""The model whose steps and decoding are timed."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a GPT-NeoX model; by default those of Pythia-160M."""

    hidden_size: int = 768
    """Width."""
    num_layers: int = 12
    """Layers."""
    num_heads: int = 12
    """Heads."""
    vocab_size: int = 50304
    """Tokens of the vocabulary."""

    def hf_config(self, longest: int) -> dict:
        """config.json of the model, for sequences of up to so many tokens."""
        return {
            "model_type": "gpt_neox",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "intermediate_size": 4 * self.hidden_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": longest,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "hidden_act": "gelu",
        }

    def transformers_config(self, longest: int):
        """The same as transformers' config."""
        from transformers import AutoConfig

        return AutoConfig.for_model(**self.hf_config(longest))

    def __str__(self) -> str:
        return f"{self.num_layers} layers of {self.hidden_size}, {self.num_heads} heads, vocabulary {self.vocab_size}"
