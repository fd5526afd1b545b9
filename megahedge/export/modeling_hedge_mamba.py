"""HedgeMamba for transformers: GPT-NeoX blocks around an attention-free mixer, with a cache of constant size.

Travels with the exported weights.  Parameters that a GPT-NeoX model has too bear its names.  Two biases are stored as offsets from
constants that bf16 cannot hold: the gate's from GATE_OFFSET, that of the step Δ from STEP_OFFSET.

Padding.  Tokens whose attention_mask is 0 are no part of the text, wherever they stand: before the first layer the real tokens of a
row are moved to its start and the padding behind them, and what the layers make of them is moved back at the end.  So convolution,
rotary positions and chunks are those of the row alone, and what stands behind is kept out of the cache.
"""

# b batch, t seq_len, d hidden_size, h num_attention_heads, p head_dim, n state_size = 2 p, k conv_kernel, r decay_rank

import dataclasses
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from megahedge.export.configuration_hedge_mamba import HedgeMambaConfig
from megahedge.kernels.causal_conv import causal_conv
from megahedge.kernels.problem import ScanState
from megahedge.kernels.scan import scan, scan_step
from megahedge.utils.precision import full_precision, widen

GATE_OFFSET = 1.2784645427610737
"""SiLU⁻¹(1)."""
STEP_OFFSET = 0.541324854612918
"""SoftPlus⁻¹(1)."""
IGNORE_INDEX = -100
CACHE_KEYWORD = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
"""Under what name this version of transformers hands a cache to `forward`."""


# ---- the cache ------------------------------------------------------------------------------------------------------------------


class HedgeMambaCache:
    """All that the model remembers of the tokens so far: of a size that does not grow with them.

    `forward` replaces what is in it; `copy.deepcopy` keeps a prefix for several continuations.
    """

    is_compileable = False
    is_croppable = False
    is_linear = (False,)
    """It knows how many positions it has seen, so `generate` may ask it what is new in a longer input."""

    def __init__(self, num_layers: int):
        self.conv_tails: list[Tensor | None] = [None] * num_layers
        """By layer the last k - 1 inputs of the convolution, [b, k - 1, d]."""
        self.states: list[ScanState | None] = [None] * num_layers
        """By layer the scan's numerator and denominator, fp32 at least."""
        self.num_tokens: Tensor | None = None
        """Real tokens seen in each row, [b]."""
        self.num_positions = 0
        """Columns seen, padding included."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, padding included."""
        return self.num_positions

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on from what was row beam_idx[i]."""

        def select(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.index_select(0, beam_idx.to(x.device))

        self.num_tokens = select(self.num_tokens)
        self.conv_tails = [select(tail) for tail in self.conv_tails]
        self.states = [state and ScanState(select(state.numerator), select(state.denominator)) for state in self.states]

    def advance(self, num_columns: int, num_tokens: Tensor) -> None:
        """Count columns and, in each row, the real tokens among them, [b]."""
        self.num_positions += num_columns
        self.num_tokens = num_tokens if self.num_tokens is None else self.num_tokens + num_tokens


# ---- padding --------------------------------------------------------------------------------------------------------------------


class Packing:
    """Moves the real tokens of each row to its start, and back.  mask [b, t]: 0 where there is padding."""

    def __init__(self, mask: Tensor):
        mask = mask.bool()
        self.lengths = mask.sum(dim=1)
        self._order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
        self._inverse = torch.argsort(self._order, dim=1)

    @classmethod
    def of(cls, attention_mask: Tensor | None, seq_len: int) -> "Packing | None":
        """None where no token of the last `seq_len` columns is padding: those before are in the cache."""
        if attention_mask is None:
            return None
        if attention_mask.dim() != 2 or attention_mask.shape[1] < seq_len:
            raise ValueError(f"attention_mask is [b, tokens so far], at least {seq_len} columns, not {list(attention_mask.shape)}")
        mask = attention_mask[:, -seq_len:]
        return None if bool(mask.all()) else cls(mask)

    def pack(self, x: Tensor) -> Tensor:
        """x [b, t, d], the real tokens first."""
        return _take(x, self._order)

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of `pack`."""
        return _take(x, self._inverse)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x [b, t, d] at the positions index [b, s] of its rows: [b, s, d]."""
    return x.gather(1, index.to(x.device).unsqueeze(-1).expand(-1, -1, x.shape[-1]))


# ---- the mixer ------------------------------------------------------------------------------------------------------------------


def rotary_angles(positions: Tensor, config: HedgeMambaConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32, [t, 1, rotary_dim / 2] or [b, t, 1, rotary_dim / 2], of positions [t] or [b, t]."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=positions.device) / max(config.rotary_dim, 1)
    angles = (positions.unsqueeze(-1).float() * (1.0 / config.rotary_emb_base**exponents)).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """x [b, t, h, p] with its first features rotated, halves paired; the arithmetic is fp32 at least."""
    cos, sin = rotary
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


class HedgehogMap(nn.Module):
    """φ(x) = softmax([W x + b, −(W x + b)]) over the features, in fp32; one map for all heads, or one a head."""

    def __init__(self, config: HedgeMambaConfig):
        super().__init__()
        heads, p = (config.num_attention_heads,) if config.feature_map_per_head else (), config.head_dim
        self.scale = p**-0.5 if config.feature_map_scale else 1.0
        self.weight = nn.Parameter(torch.empty(*heads, p, p))
        self.bias = nn.Parameter(torch.empty(*heads, p))

    def reset_parameters(self) -> None:
        """W = I, b = 0."""
        for weight in self.weight if self.weight.dim() == 3 else (self.weight,):
            nn.init.eye_(weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, t, h, p] → [b, t, h, n], positive."""
        with full_precision(x):
            x, weight, bias = widen(x, self.weight, self.bias)
            x = x * self.scale
            mapped = torch.einsum("bthi,hoi->btho", x, weight) + bias if weight.dim() == 3 else F.linear(x, weight, bias)
            return torch.cat((mapped, -mapped), dim=-1).softmax(-1)


class CausalConv(nn.Module):
    """Depthwise causal convolution over time; weight [d, k], its last tap on the current token."""

    def __init__(self, config: HedgeMambaConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size, config.conv_kernel))
        self.bias = nn.Parameter(torch.empty(config.hidden_size))

    def reset_parameters(self) -> None:
        """The identity."""
        nn.init.zeros_(self.weight)
        nn.init.ones_(self.weight[:, -1])
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, tail: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [b, t, d] after inputs tail [b, k - 1, d] → the output and the new tail; lengths [b]: real tokens, None for all."""
        y, last = causal_conv(x, self.weight, self.bias, initial=tail)
        if lengths is None:
            return y, last
        num_kept = self.weight.shape[1] - 1
        before = x.new_zeros(x.shape[0], num_kept, x.shape[2]) if tail is None else tail.to(x.dtype)
        return y, _take(torch.cat((before, x), dim=1), lengths.unsqueeze(1) + torch.arange(num_kept, device=lengths.device))


class Rate(nn.Module):
    """λ ≥ 0 [h, …], of each head or (h = 1) of all.

    A value that an optimizer has brought below 0 counts as 0 and still has its gradient, so that it can come back.
    """

    def __init__(self, config: HedgeMambaConfig):
        super().__init__()
        features = config.head_dim if config.decay_tie_signs else 2 * config.head_dim
        shape = {"head": (), "state": (features,), "channel": (features, config.head_dim)}[config.decay]
        self.tied = config.decay_tie_signs and config.decay != "head"
        self.start = config.decay_init
        self.weight = nn.Parameter(torch.empty(config.num_attention_heads if config.decay_per_head else 1, *shape))

    def reset_parameters(self) -> None:
        """λ = decay_init."""
        nn.init.constant_(self.weight, self.start)

    def forward(self) -> Tensor:
        """[h], [h, n] or [h, n, p]."""
        (rate,) = widen(self.weight)
        rate = rate + (rate.clamp(min=0) - rate).detach()
        return torch.cat((rate, rate), dim=1) if self.tied else rate


class Step(nn.Module):
    """Δ = SoftPlus((x W_d + b_d) W_u + b_u + STEP_OFFSET), of each head or (h = 1) of all; W_d only where Δ is wider than 1."""

    def __init__(self, config: HedgeMambaConfig):
        super().__init__()
        features = config.head_dim if config.decay_tie_signs else 2 * config.head_dim
        self.width = {"head": 1, "state": features, "channel": config.head_dim}[config.decay_step]
        self.tied = config.decay_tie_signs and config.decay_step == "state"
        heads = config.num_attention_heads if config.decay_per_head else 1
        inner = config.hidden_size
        self.down_weight = self.down_bias = None
        if self.width > 1:
            inner = config.decay_rank or max(1, config.hidden_size // 16)
            self.down_weight = nn.Parameter(torch.empty(inner, config.hidden_size))
            self.down_bias = nn.Parameter(torch.empty(inner))
        self.up_weight = nn.Parameter(torch.empty(heads * self.width, inner))
        self.up_bias = nn.Parameter(torch.empty(heads * self.width))

    def reset_parameters(self, std: float) -> None:
        """Δ = 1."""
        if self.down_weight is not None:
            nn.init.normal_(self.down_weight, std=std)
            nn.init.zeros_(self.down_bias)
        nn.init.zeros_(self.up_weight)
        nn.init.zeros_(self.up_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, t, d] → [b, t, h, 1 | n | p].  The wide product x W_d has x's precision, the rest is fp32 at least."""
        if self.down_weight is not None:
            x = F.linear(x, self.down_weight, self.down_bias)
        with full_precision(x):
            x, up_weight, up_bias = widen(x, self.up_weight, self.up_bias)
            step = F.softplus(F.linear(x, up_weight, up_bias) + STEP_OFFSET).unflatten(-1, (-1, self.width))
        return torch.cat((step, step), dim=-1) if self.tied else step


class Decay(nn.Module):
    """What the scan forgets by, Λ_t = exp(−λ Δ_t)."""

    def __init__(self, config: HedgeMambaConfig):
        super().__init__()
        self.rate = Rate(config)
        self.step = Step(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [b, t, d] → Δ and λ."""
        return self.step(x), self.rate()


class Gate(nn.Linear):
    """SiLU(x W + b + GATE_OFFSET), fp32 at least."""

    def reset_parameters(self) -> None:
        """1 for every x."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, t, d] → the same."""
        (logits,) = widen(super().forward(x))
        return F.silu(logits + GATE_OFFSET)


class HedgeMambaMixer(nn.Module):
    """What stands in place of attention: y = φ(q) h / φ(q) z, where h and z are sums of φ(k) ⊗ v and φ(k) that decay.

    query_key_value is head-major, [h, 3, p].
    """

    def __init__(self, config: HedgeMambaConfig, layer_index: int):
        super().__init__()
        d = config.hidden_size
        self.layer_index = layer_index
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.rotates_features = config.rope_position == "after"
        self.normalizer_eps = config.normalizer_eps
        self.query_key_value = nn.Linear(d, 3 * d, bias=config.attention_bias)
        self.dense = nn.Linear(d, d, bias=config.attention_bias)
        self.query_map, self.key_map = HedgehogMap(config), HedgehogMap(config)
        self.conv = CausalConv(config) if config.conv_kernel else None
        self.decay = Decay(config) if config.decay != "none" else None
        self.gate_proj = Gate(d, d) if config.gate else None

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], lengths: Tensor | None, cache: HedgeMambaCache | None) -> Tensor:
        """hidden [b, t, d] → the same.  lengths [b]: real tokens of each row, at its start; None where all are."""
        x = hidden if self.conv is None else self._convolve(hidden, lengths, cache)
        q, k, v = self.query_key_value(x).unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(-2)
        C, B = self._features(q, k, rotary)  # [b, t, h, n]
        step, rate = (None, None) if self.decay is None else self.decay(x)
        if step is not None:
            step = step.expand(*C.shape[:3], -1)
        if lengths is not None:  # what follows the real tokens adds nothing and lets nothing decay
            real = (torch.arange(x.shape[1], device=lengths.device) < lengths.unsqueeze(1))[..., None, None]
            B, step = B * real, None if step is None else step * real
        mixed = self._scan(C, B, v, step, rate, cache)
        if self.gate_proj is not None:
            mixed = mixed * self.gate_proj(hidden).unflatten(-1, (self.num_heads, self.head_dim)).to(mixed.dtype)
        return self.dense(mixed.flatten(2))

    def _convolve(self, hidden: Tensor, lengths: Tensor | None, cache: HedgeMambaCache | None) -> Tensor:
        tail = None if cache is None else cache.conv_tails[self.layer_index]
        x, tail = self.conv(hidden, tail, lengths)
        if cache is not None:
            cache.conv_tails[self.layer_index] = tail
        return x

    def _features(self, q: Tensor, k: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self.rotates_features:
            return rotate(self.query_map(q), rotary), rotate(self.key_map(k), rotary)
        return self.query_map(rotate(q, rotary)), self.key_map(rotate(k, rotary))

    def _scan(self, C, B, v, step, rate, cache: HedgeMambaCache | None) -> Tensor:
        """A single token by the recurrence, several by chunks."""
        state = None if cache is None else cache.states[self.layer_index]
        if C.shape[1] == 1:
            inputs = (None if x is None else x.squeeze(1) for x in (C, B, v, step))
            mixed, state = scan_step(*inputs, rate, state, eps=self.normalizer_eps)
            mixed = mixed.unsqueeze(1)
        else:
            mixed, state = scan(C, B, v, step, rate, initial_state=state, eps=self.normalizer_eps)
        if cache is not None:
            cache.states[self.layer_index] = state
        return mixed


# ---- the model ------------------------------------------------------------------------------------------------------------------


class HedgeMambaMLP(nn.Module):
    """GPT-NeoX's feed-forward half of a block."""

    def __init__(self, config: HedgeMambaConfig):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, t, d] → the same."""
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(hidden)))


class HedgeMambaLayer(GradientCheckpointingLayer):
    """GPT-NeoX's block: mixer and MLP side by side, or one after the other."""

    def __init__(self, config: HedgeMambaConfig, layer_index: int):
        super().__init__()
        self.use_parallel_residual = config.use_parallel_residual
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = HedgeMambaMixer(config, layer_index)
        self.mlp = HedgeMambaMLP(config)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], lengths: Tensor | None, cache: HedgeMambaCache | None = None):
        """hidden [b, t, d] → the same."""
        mixed = self.attention(self.input_layernorm(hidden), rotary, lengths, cache)
        if self.use_parallel_residual:
            return hidden + (mixed + self.mlp(self.post_attention_layernorm(hidden)))
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@dataclasses.dataclass
class HedgeMambaOutput(ModelOutput):
    """What HedgeMambaModel returns."""

    last_hidden_state: Tensor | None = None
    """[b, t, d]"""
    cache: HedgeMambaCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    """Of the embedding and after each layer, the last after the final norm."""


@dataclasses.dataclass
class HedgeMambaCausalLMOutput(ModelOutput):
    """What HedgeMambaForCausalLM returns."""

    loss: Tensor | None = None
    """Mean cross-entropy in nats over the labels that are not -100."""
    logits: Tensor | None = None
    """[b, t, vocab_size]"""
    cache: HedgeMambaCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class HedgeMambaPreTrainedModel(PreTrainedModel):
    """Initialisation and loading."""

    config_class = HedgeMambaConfig
    base_model_prefix = "gpt_neox"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HedgeMambaLayer"]  # noqa: RUF012 - transformers reads it so
    _is_stateful = True  # the cache cannot be cut back, which speculative decoding would ask for

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (HedgehogMap, CausalConv, Rate, Gate)):
            module.reset_parameters()
        elif isinstance(module, Step):
            module.reset_parameters(self.config.initializer_range)
        else:
            super()._init_weights(module)


class HedgeMambaModel(HedgeMambaPreTrainedModel):
    """Embedding, layers and final norm."""

    def __init__(self, config: HedgeMambaConfig):
        super().__init__(config)
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([HedgeMambaLayer(config, index) for index in range(config.num_hidden_layers)])
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_in

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_in = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: HedgeMambaCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: HedgeMambaCache | None = None,
    ) -> HedgeMambaOutput | tuple:
        """input_ids [b, t] or inputs_embeds [b, t, d], the tokens that follow those in the cache.

        attention_mask [b, tokens so far]: 0 for padding, on either side.  A cache is made where use_cache is true and none is given;
        past_key_values is another name for it.  By default use_cache is that of the config, and false in training.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self.embed_in(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values if cache is None else cache, use_cache)
        batch, seq_len = hidden.shape[:2]
        packing = Packing.of(attention_mask, seq_len)
        lengths = None if packing is None else packing.lengths
        hidden = hidden if packing is None else packing.pack(hidden)
        positions = torch.arange(seq_len, device=hidden.device)
        if cache is not None and cache.num_tokens is not None:
            positions = positions + cache.num_tokens.to(hidden.device).unsqueeze(1)
        rotary = rotary_angles(positions, self.config)

        states = [hidden]
        for layer in self.layers:
            hidden = layer(hidden, rotary, lengths, cache=cache)
            states.append(hidden)
        hidden = states[-1] = self.final_layer_norm(hidden)
        if cache is not None:
            cache.advance(seq_len, torch.full((batch,), seq_len, device=hidden.device) if lengths is None else lengths)

        def restored(x: Tensor) -> Tensor:
            return x if packing is None else packing.unpack(x)

        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output = HedgeMambaOutput(restored(hidden), cache, tuple(map(restored, states)) if wanted else None)
        return output.to_tuple() if return_dict is False else output

    def _cache(self, given: HedgeMambaCache | None, use_cache: bool | None) -> HedgeMambaCache | None:
        if use_cache is None:
            use_cache = given is not None or (self.config.use_cache and not self.training)
        if not use_cache:
            return None
        if given is None:
            return HedgeMambaCache(self.config.num_hidden_layers)
        if not isinstance(given, HedgeMambaCache):
            raise ValueError(f"the cache is a HedgeMambaCache, not a {type(given).__name__}")
        return given


class HedgeMambaForCausalLM(HedgeMambaPreTrainedModel, GenerationMixin):
    """The model with its head."""

    _tied_weights_keys = {"embed_out.weight": "gpt_neox.embed_in.weight"}  # noqa: RUF012 - transformers reads it so

    def __init__(self, config: HedgeMambaConfig):
        super().__init__(config)
        self.gpt_neox = HedgeMambaModel(config)
        self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.gpt_neox.embed_in

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.gpt_neox.embed_in = value

    def get_output_embeddings(self) -> nn.Module:
        return self.embed_out

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.embed_out = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: HedgeMambaCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int = 0,
        past_key_values: HedgeMambaCache | None = None,
    ) -> HedgeMambaCausalLMOutput | tuple:
        """As HedgeMambaModel's, and labels [b, t], equal to input_ids: token t + 1 is what position t is to predict, -100 counts nothing.

        logits_to_keep: logits of so many last positions only (0: of all).
        """
        if labels is not None and logits_to_keep:
            raise ValueError("the loss needs all logits: give either labels or logits_to_keep")
        output = self.gpt_neox(
            input_ids, attention_mask, inputs_embeds, cache, use_cache, output_hidden_states, past_key_values=past_key_values
        )
        logits = self.embed_out(output.last_hidden_state[:, -logits_to_keep:])
        loss = None if labels is None else next_token_loss(logits, labels)
        result = HedgeMambaCausalLMOutput(loss, logits, output.cache, output.hidden_states)
        return result.to_tuple() if return_dict is False else result

    # ---- what GenerationMixin asks for -----------------------------------------------------------------------------------------

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *_, **__) -> None:
        """Called by `generate` before its first step: our cache, where it would put one of keys and values."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is for attention; this model has a cache of its own"
            )
        if generation_config.use_cache is not False and model_kwargs.get(CACHE_KEYWORD) is None:
            model_kwargs[CACHE_KEYWORD] = HedgeMambaCache(self.config.num_hidden_layers)

    def prepare_inputs_for_generation(self, input_ids, inputs_embeds=None, **kwargs) -> dict:
        """Without positions, which earlier versions of transformers hand over and `forward` counts itself."""
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        return {name: value for name, value in inputs.items() if name not in ("cache_position", "position_ids")}

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *arguments, **keywords) -> dict:
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *arguments, **keywords)
        if outputs.cache is not None:
            model_kwargs[CACHE_KEYWORD] = outputs.cache
        return model_kwargs


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats, fp32 at least, of labels [b, t] one position later; 0 where all are -100."""
    (logits,), targets = widen(logits[:, :-1]), labels[:, 1:].to(logits.device)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return losses / (targets != IGNORE_INDEX).sum().clamp(min=1)
