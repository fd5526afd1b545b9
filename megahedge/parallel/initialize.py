"""Fresh parameters that are the same for every TP size."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megahedge.parallel.sharding import Init, load_parameters
from megahedge.parallel.topology import TensorParallel


def initialize_parameters(model: nn.Module, seed: int, tensor_parallel: TensorParallel) -> None:
    """Draw every parameter in full from a generator seeded by (seed, name) and keep this rank's piece.

    Neither the TP size nor the order or presence of other parameters changes a draw.  The draw is made on the CPU in fp32, so that
    it does not depend on the device or on the parameter's dtype either.
    """
    load_parameters(model, fresh_values(model, seed), tensor_parallel)


def fresh_values(model: nn.Module, seed: int) -> Callable[..., Tensor]:
    """A function of name and index that draws any of the model's parameters, or the piece of it at the index."""
    declared = {name: (parameter.shard_spec.full_shape, parameter.init) for name, parameter in model.named_parameters()}
    return lambda name, index=(): draw(name, *declared[name], seed)[index]


def draw(name: str, shape: tuple[int, ...], init: Init, seed: int) -> Tensor:
    """The full fp32 tensor of that name."""
    if init.pattern is not None:
        return init.pattern(shape)
    if not init.std:
        return torch.full(shape, init.constant)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, init.std, generator=generator)
