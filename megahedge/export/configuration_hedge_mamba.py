"""Configuration of HedgeMamba, an attention-free model of GPT-NeoX's shape.  Travels with the exported weights."""

from transformers import PretrainedConfig

CHOICES = {
    "mixer": ("hedgehog", "hedge_mamba"),
    "feature_map": ("hedgehog_softmax",),
    "rope_position": ("before", "after"),
    "decay": ("none", "head", "state", "channel"),
    "decay_step": ("head", "state", "channel"),
}


class HedgeMambaConfig(PretrainedConfig):
    """Sizes under GPT-NeoX's names, and what there is in place of attention (*Attention to Mamba*, arXiv 2604.14191).

    mixer: `hedgehog`, linear attention with learnt feature maps, or `hedge_mamba`, the same with what follows from decay on.
    feature_map: `hedgehog_softmax` is φ(x) = softmax([W x + b, −(W x + b)]) over the features.
    feature_map_per_head: each head has maps of its own.  feature_map_scale: queries and keys are divided by √head_dim first.
    rope_position: rotary embedding `before` (of queries and keys) or `after` (of their features) the feature maps.
    normalizer_eps: least magnitude of the normaliser.
    decay: what the rate λ varies over: `none` (there is no decay), `head`, `state` (features) or `channel` (features and channels).
    decay_step: what the step Δ varies over besides the token: `head`, `state` or `channel`.
    decay_per_head: each head has λ and Δ of its own.  decay_tie_signs: a feature and its negative share them.
    decay_init: the value that λ started from.  decay_rank: width between Δ's two maps (0: hidden_size / 16).
    conv_kernel: taps of the causal convolution in front (0: none).  gate: whether the output is multiplied by SiLU(x W + b).
    bypass: whether x W + b of the mixer's input is added to the scan's output, before the gate.
    teacher, teacher_revision: the model with softmax attention that it learnt from: its name on the hub, or a folder, as `./…` from where
    the export was made; None for a folder elsewhere.

    Raises ValueError for an option that is not known.
    """

    model_type = "hedge_mamba"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012 - transformers reads it so

    def __init__(
        self,
        vocab_size=50304,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        hidden_act="gelu",
        max_position_embeddings=2048,
        use_parallel_residual=True,
        rotary_pct=0.25,
        rotary_emb_base=10000.0,
        attention_bias=True,
        layer_norm_eps=1e-5,
        initializer_range=0.02,
        tie_word_embeddings=False,
        use_cache=True,
        mixer="hedge_mamba",
        feature_map="hedgehog_softmax",
        feature_map_per_head=False,
        feature_map_scale=False,
        rope_position="after",
        normalizer_eps=1e-6,
        decay="channel",
        decay_step="channel",
        decay_per_head=False,
        decay_tie_signs=True,
        decay_init=0.0,
        decay_rank=0,
        conv_kernel=4,
        gate=True,
        bypass=False,
        teacher=None,
        teacher_revision=None,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.use_parallel_residual = use_parallel_residual
        self.rotary_pct = rotary_pct
        self.rotary_emb_base = rotary_emb_base
        self.attention_bias = attention_bias
        self.layer_norm_eps = layer_norm_eps
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.mixer = mixer
        self.feature_map = feature_map
        self.feature_map_per_head = feature_map_per_head
        self.feature_map_scale = feature_map_scale
        self.rope_position = rope_position
        self.normalizer_eps = normalizer_eps
        self.decay = decay
        self.decay_step = decay_step
        self.decay_per_head = decay_per_head
        self.decay_tie_signs = decay_tie_signs
        self.decay_init = decay_init
        self.decay_rank = decay_rank
        self.conv_kernel = conv_kernel
        self.gate = gate
        self.bypass = bypass
        self.teacher = teacher
        self.teacher_revision = teacher_revision
        for name, known in CHOICES.items():
            matters = name != "decay_step" or decay != "none"
            if matters and getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known; use one of {', '.join(known)}")
        if mixer == "hedgehog" and (decay != "none" or conv_kernel or gate or bypass):
            raise ValueError("mixer='hedgehog' has decay='none', conv_kernel=0, gate=False and bypass=False")
        # tie_word_embeddings is a field of the base class in some versions of transformers and one of ours in others
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        self.tie_word_embeddings = tie_word_embeddings

    @property
    def head_dim(self) -> int:
        """Features of a head's queries, keys and values."""
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """How many of them RoPE rotates."""
        return int(self.head_dim * self.rotary_pct)
