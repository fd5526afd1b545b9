"""Small models with parameters that hide no fault: biases away from zero, norms away from the identity."""

import torch
from torch import nn

from megahedge.config.model import ModelConfig
from megahedge.models.language_model import LanguageModel
from megahedge.parallel.initialize import draw
from megahedge.parallel.sharding import Init, load_parameters
from megahedge.parallel.topology import TensorParallel

SINGLE = TensorParallel()


def small_config(**changes) -> ModelConfig:
    """Two layers of 4 heads; an odd vocabulary."""
    sizes = dict(vocab_size=97, hidden_size=64, num_layers=2, num_heads=4, intermediate_size=96, max_position_embeddings=64)
    return ModelConfig(**{**sizes, **changes})


def random_parameter(name: str, parameter: nn.Parameter, seed: int = 0) -> torch.Tensor:
    """The full tensor of that name: matrices of a scale that keeps activations near 1, vectors of spread 0.2 around their own start."""
    shape = parameter.shard_spec.full_shape
    if hasattr(parameter, "lower_bound"):
        return parameter.lower_bound + draw(name, shape, Init(std=0.2), seed).abs()
    if len(shape) == 1:
        return parameter.init.constant + draw(name, shape, Init(std=0.2), seed)
    return draw(name, shape, Init(std=shape[1] ** -0.5), seed)


def randomize(model: LanguageModel, seed: int = 0) -> LanguageModel:
    """Fill the model, the same for every TP size."""
    parameters = dict(model.named_parameters())
    load_parameters(model, lambda name, index: random_parameter(name, parameters[name], seed)[index], model.tensor_parallel)
    return model


def random_tokens(vocab_size: int, batch: int = 2, seq_len: int = 13, seed: int = 1) -> torch.Tensor:
    """[batch, seq_len] token ids; an odd length."""
    return torch.randint(0, vocab_size, (batch, seq_len), generator=torch.Generator().manual_seed(seed))


def train_feature_maps_only(model: LanguageModel) -> LanguageModel:
    """Freeze what stage 1 does not train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".query_map." in name or ".key_map." in name)
    return model
