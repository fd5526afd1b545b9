"""GPT-NeoX: the Pythia suite, GPT-NeoX-20B and models of their kind."""

import re

from megahedge.config.model import ACTIVATIONS, ModelConfig
from megahedge.models.families.base import Family
from megahedge.utils.errors import InputError

_OUTER_NAMES = {
    "embedding.weight": "gpt_neox.embed_in.weight",
    "final_norm.weight": "gpt_neox.final_layer_norm.weight",
    "final_norm.bias": "gpt_neox.final_layer_norm.bias",
    "lm_head.weight": "embed_out.weight",
}
_BLOCK_NAMES = {
    "mixer_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mixer.qkv_proj": "attention.query_key_value",
    "mixer.out_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
_ADDED = re.compile(r"blocks\.(\d+)\.mixer\.((?:query_map|key_map|conv|decay|bypass_proj|gate_proj)\..+)")
_OLD_BUFFER = re.compile(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.\w+)")


class GPTNeoX(Family):
    """qkv is packed head-major [h, 3, p]; RoPE turns the first rotary_pct of each head; every linear but the head has a bias.

    Published dropout rates are dropped: nothing here trains with dropout.
    """

    name = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"

    def model_config(self, hf_config: dict) -> ModelConfig:
        """Reads both spellings: rotary_pct and rotary_emb_base as Pythia was published, rope_parameters as transformers 5 writes."""
        missing = [key for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads") if key not in hf_config]
        if missing:
            raise InputError(f"the config lacks {', '.join(missing)}")
        rope = _rope_parameters(hf_config)
        activation = hf_config.get("hidden_act", "gelu")
        if activation not in ACTIVATIONS:
            raise InputError(f"hidden_act={activation!r} is not supported; use a model with one of {', '.join(ACTIVATIONS)}")
        return ModelConfig(
            vocab_size=hf_config["vocab_size"],
            hidden_size=hf_config["hidden_size"],
            num_layers=hf_config["num_hidden_layers"],
            num_heads=hf_config["num_attention_heads"],
            intermediate_size=hf_config.get("intermediate_size", 4 * hf_config["hidden_size"]),
            max_position_embeddings=hf_config.get("max_position_embeddings", 2048),
            family=self.name,
            parallel_residual=hf_config.get("use_parallel_residual", True),
            rotary_pct=rope["partial_rotary_factor"],
            rotary_base=rope["rope_theta"],
            activation=activation,
            attention_bias=hf_config.get("attention_bias", True),
            norm_eps=hf_config.get("layer_norm_eps", 1e-5),
            initializer_range=hf_config.get("initializer_range", 0.02),
            tie_word_embeddings=hf_config.get("tie_word_embeddings", False),
        )

    def hf_config(self, config: ModelConfig) -> dict:
        return {
            "architectures": [self.architecture],
            "attention_bias": config.attention_bias,
            "hidden_act": config.activation,
            "hidden_size": config.hidden_size,
            "initializer_range": config.initializer_range,
            "intermediate_size": config.intermediate_size,
            "layer_norm_eps": config.norm_eps,
            "max_position_embeddings": config.max_position_embeddings,
            "model_type": self.name,
            "num_attention_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "rope_parameters": {
                "partial_rotary_factor": config.rotary_pct,
                "rope_theta": config.rotary_base,
                "rope_type": "default",
            },
            "tie_word_embeddings": config.tie_word_embeddings,
            "use_parallel_residual": config.parallel_residual,
            "vocab_size": config.vocab_size,
        }

    def hf_name(self, name: str) -> str:
        if name in _OUTER_NAMES:
            return _OUTER_NAMES[name]
        added = _ADDED.fullmatch(name)
        if added:  # a student's, published by nobody else
            return f"gpt_neox.layers.{added[1]}.attention.{added[2]}"
        layer, module, kind = _BLOCK.fullmatch(name).groups()
        return f"gpt_neox.layers.{layer}.{_BLOCK_NAMES[module]}.{kind}"

    def canonical_name(self, published: str) -> str:
        return "embed_out.weight" if published == "lm_head.weight" else published

    def ignorable(self, published: str) -> bool:
        return _OLD_BUFFER.fullmatch(published) is not None


def _rope_parameters(hf_config: dict) -> dict:
    """partial_rotary_factor and rope_theta from either spelling; refuses every scaled kind of RoPE."""
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise InputError(f"rope_parameters={rope!r} must be an object with partial_rotary_factor and rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise InputError(f"RoPE scaling (rope_type={kind!r}) is not supported; use a model with plain RoPE")
    return {
        "partial_rotary_factor": rope.get("partial_rotary_factor", hf_config.get("rotary_pct", 0.25)),
        "rope_theta": rope.get("rope_theta", hf_config.get("rotary_emb_base", 10000)),
    }
