"""HedgeMamba for transformers: GPT-NeoX blocks around an attention-free mixer, with a cache of constant size.

Travels with the exported weights.  Parameters that a GPT-NeoX model has too bear its names; two biases are stored as offsets (see the
mixer).
"""

# b batch, t seq_len, d hidden_size

import dataclasses
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput, logging

from megahedge.export.cache import HedgeMambaCache, Packing
from megahedge.export.configuration_hedge_mamba import HedgeMambaConfig
from megahedge.export.mixer import Bypass, CausalConv, Gate, HedgehogMap, HedgeMambaMixer, Rate, Step, rotary_angles
from megahedge.utils.labels import IGNORE_INDEX
from megahedge.utils.precision import widen

logger = logging.get_logger(__name__)

CACHE_KEYWORD = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
"""Under what name this version of transformers hands a cache to `forward`."""
PIECE = 2048
"""Tokens of a row that are read at a time where no gradient is wanted: the memory of a long prompt does not grow with it, and is reused."""
_NO_POSITIONS = "positions and documents are those that attention_mask leaves of a row"


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

    @property
    def past_key_values(self) -> HedgeMambaCache | None:
        """The cache under its other name."""
        return self.cache


@dataclasses.dataclass
class HedgeMambaCausalLMOutput(ModelOutput):
    """What HedgeMambaForCausalLM returns."""

    loss: Tensor | None = None
    """Cross-entropy in nats: the mean over the labels that are not -100, or the sum divided by num_items_in_batch."""
    logits: Tensor | None = None
    """[b, t, vocab_size]"""
    cache: HedgeMambaCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None

    @property
    def past_key_values(self) -> HedgeMambaCache | None:
        """The cache under its other name."""
        return self.cache


class HedgeMambaPreTrainedModel(PreTrainedModel):
    """Initialisation and loading."""

    config_class = HedgeMambaConfig
    base_model_prefix = "gpt_neox"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HedgeMambaLayer"]  # noqa: RUF012 - transformers reads it so
    _is_stateful = True  # the cache cannot be cut back, which speculative decoding would ask for

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (HedgehogMap, CausalConv, Rate, Bypass, Gate)):
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

        attention_mask [b, tokens so far]: 0 for padding, wherever it stands.  A column of padding returns what the last real token before
        it returns, or 0 where there is none.  A cache is made where use_cache is true and none is given; past_key_values is another name
        for it.  Where use_cache is false, a given cache is read and left as it is.  By default use_cache is true for a given cache, else
        that of the config, and false in training.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self.embed_in(input_ids) if inputs_embeds is None else inputs_embeds
        batch, seq_len = hidden.shape[:2]
        if seq_len == 0:
            raise ValueError("there are no tokens: give one at least")
        cache, keeps_cache = self._cache(past_key_values if cache is None else cache, use_cache, batch)
        packing = Packing.of(attention_mask, batch, seq_len)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = [] if wants_states else None
        if seq_len > PIECE and packing is None and not wants_states and not torch.is_grad_enabled():
            carried = HedgeMambaCache(len(self.layers)) if cache is None else cache
            hidden = torch.cat([self._read(piece, None, carried, None) for piece in hidden.split(PIECE, dim=1)], dim=1)
        else:
            hidden = self._read(hidden, packing, cache, states)
        output = HedgeMambaOutput(hidden, cache if keeps_cache else None, None if states is None else (*states, hidden))
        return output.to_tuple() if return_dict is False else output

    def _read(self, hidden: Tensor, packing: Packing | None, cache: HedgeMambaCache | None, states: list[Tensor] | None) -> Tensor:
        """Embeddings [b, t, d] → what the head reads, [b, t, d].  Moves the cache on, and appends the input of each layer to states."""
        batch, seq_len = hidden.shape[:2]
        lengths = None if packing is None else packing.lengths
        hidden = hidden if packing is None else packing.pack(hidden)
        positions = torch.arange(seq_len, device=hidden.device)
        if cache is not None and cache.num_tokens is not None:
            positions = positions + cache.num_tokens.to(hidden.device).unsqueeze(1)
        rotary = rotary_angles(positions, self.config)

        def restored(x: Tensor, before: Tensor | None = None) -> Tensor:
            return x if packing is None else packing.unpack(x, before)

        for layer in self.layers:
            if states is not None:
                states.append(restored(hidden))
            hidden = layer(hidden, rotary, lengths, cache=cache)
        hidden = restored(self.final_layer_norm(hidden), None if cache is None else cache.last_hidden)
        if cache is not None:
            cache.advance(hidden, torch.full((batch,), seq_len, device=hidden.device) if lengths is None else lengths)
        return hidden

    def _cache(self, given: HedgeMambaCache | None, use_cache: bool | None, batch: int) -> tuple[HedgeMambaCache | None, bool]:
        """The cache for the layers to read and write, and whether the caller is to have it."""
        if given is not None:
            _check_cache(given, self.config.num_hidden_layers, batch)
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():  # the backward would write it a second time
            if given is not None:
                raise ValueError("gradient checkpointing cannot go on from a cache: give the whole text, or switch it off")
            if use_cache:
                logger.warning_once("no cache is made in training with gradient checkpointing: use_cache=True has no effect")
            return None, False
        if use_cache is None:
            use_cache = given is not None or (self.config.use_cache and not self.training)
        if given is None:
            return HedgeMambaCache(self.config.num_hidden_layers) if use_cache else None, use_cache
        return given if use_cache else given.fork(), use_cache


def _check_cache(cache: HedgeMambaCache, num_layers: int, batch: int) -> None:
    """Raise ValueError unless it is one of such a model, and of as many rows."""
    if not isinstance(cache, HedgeMambaCache):
        raise ValueError(f"the cache is a HedgeMambaCache, not a {type(cache).__name__}")
    if len(cache.states) != num_layers:
        raise ValueError(f"the cache is one of {len(cache.states)} layers, the model has {num_layers}")
    if cache.num_tokens is not None and len(cache.num_tokens) != batch:
        raise ValueError(f"the cache has {len(cache.num_tokens)} rows, the input {batch}")


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
        logits_to_keep: int | Tensor = 0,
        past_key_values: HedgeMambaCache | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs,
    ) -> HedgeMambaCausalLMOutput | tuple:
        """As HedgeMambaModel's, and labels [b, t], equal to input_ids: token t + 1 is what position t is to predict, -100 counts nothing.

        Of a row with padding the labels that count are those that count of the row alone.
        logits_to_keep: logits of so many last positions only (0: of all), or of the positions in a tensor.
        num_items_in_batch: what the summed loss is divided by, where gradients of several batches are accumulated (transformers' Trainer
        counts their labels); by default the labels of this one.
        Raises TypeError for what other models may be asked for and this one does not do; None and False ask for nothing.
        """
        unknown = sorted(name for name, value in kwargs.items() if value is not None and value is not False)
        if unknown:
            raise TypeError(f"{', '.join(unknown)}: not known here; {_NO_POSITIONS}, and there is no attention to put out")
        keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if labels is not None and not keeps_all:
            raise ValueError("the loss needs all logits: give either labels or logits_to_keep")
        output = self.gpt_neox(
            input_ids, attention_mask, inputs_embeds, cache, use_cache, output_hidden_states, past_key_values=past_key_values
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.embed_out(output.last_hidden_state[:, kept])
        loss = None if labels is None else next_token_loss(logits, _labels_of_text(labels, attention_mask), num_items_in_batch)
        result = HedgeMambaCausalLMOutput(loss, logits, output.cache, output.hidden_states)
        return result.to_tuple() if return_dict is False else result

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *_, **__) -> None:
        """Called by `generate` before its first step: our cache, where it would put one of keys and values."""
        if model_kwargs.get("position_ids") is not None:
            raise ValueError(f"position_ids: not known here; {_NO_POSITIONS}")
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is for attention; this model has a cache of its own"
            )
        given = [model_kwargs.pop(name, None) for name in ("cache", "past_key_values")]
        cache = given[1] if given[0] is None else given[0]
        if generation_config.use_cache is not False:
            model_kwargs[CACHE_KEYWORD] = HedgeMambaCache(self.config.num_hidden_layers) if cache is None else cache
        elif cache is not None:
            raise ValueError("use_cache=False reads the whole text for every token, and cannot go on from a cache")

    def prepare_inputs_for_generation(self, input_ids, inputs_embeds=None, **kwargs) -> dict:
        """Without positions, which some versions of transformers hand over and `forward` counts itself."""
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        return {name: value for name, value in inputs.items() if name not in ("cache_position", "position_ids")}

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *arguments, **keywords) -> dict:
        """Called by `generate` after each step.

        The mask goes once the prompt is in the cache: what follows has no padding, and to look for some would make each token wait for
        the device.
        """
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *arguments, **keywords)
        if outputs.cache is not None:
            model_kwargs[CACHE_KEYWORD] = outputs.cache
            model_kwargs.pop("attention_mask", None)
        return model_kwargs


def _labels_of_text(labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """labels [b, t], -100 at padding, and at the first real token of a row: what is before that has seen nothing of it."""
    if attention_mask is None:
        return labels
    mask = attention_mask[:, -labels.shape[1] :].bool().to(labels.device)
    return labels.masked_fill(~mask | (mask.cumsum(dim=1) == 1), IGNORE_INDEX)


def next_token_loss(logits: Tensor, labels: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """Cross-entropy in nats, fp32 at least, of labels [b, t] one position later: their sum over num_items, or the mean.

    By default num_items is the number of labels that are not -100; 0 where there are none.
    """
    if labels.shape != logits.shape[:2]:
        raise ValueError(f"labels are {list(labels.shape)}, where the input is {list(logits.shape[:2])}")
    (logits,), targets = widen(logits[:, :-1]), labels[:, 1:].to(logits.device)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    count = (targets != IGNORE_INDEX).sum() if num_items is None else torch.as_tensor(num_items, device=losses.device)
    return losses / count.clamp(min=1)
