"""Fresh parameters that are the same for every TP size."""

import hashlib

import torch
from torch import Tensor, nn

from megahedge.parallel.sharding import Init, load_parameters
from megahedge.parallel.topology import TensorParallel


def initialize_parameters(model: nn.Module, seed: int, tensor_parallel: TensorParallel) -> None:
    """Draw every parameter in full from a generator seeded by (seed, name) and keep this rank's piece.

    Neither the TP size nor the order or presence of other parameters changes a draw.  The draw is made on the CPU in fp32, so that
    it does not depend on the device or on the parameter's dtype either.
    """
    parameters = dict(model.named_parameters())

    def read(name, index):
        return draw(name, parameters[name].shard_spec.full_shape, parameters[name].init, seed)[index]

    load_parameters(model, read, tensor_parallel)


def draw(name: str, shape: tuple[int, ...], init: Init, seed: int) -> Tensor:
    """The full fp32 tensor of that name."""
    if not init.std:
        return torch.full(shape, init.constant)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, init.std, generator=generator)
