"""How a parameter is cut over a TP group: declared where it is made, read by loading, resharding, export and initialisation.

The full shape is kept on the parameter because ZeRO-3 empties `parameter.data` but leaves attributes alone.  (`copy.deepcopy` of a
parameter and a move off the meta device make new Parameters without them: build the model where it will live.)
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from megahedge.parallel.topology import TensorParallel
from megahedge.utils.errors import InputError

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """The whole parameter and the dimension along which ranks hold contiguous equal pieces of it."""

    dim: int | None
    """Dimension that is cut; None for a parameter that every rank holds whole."""
    full_shape: tuple[int, ...]
    """Shape of the whole parameter as published, without padding."""


@dataclasses.dataclass(frozen=True)
class Init:
    """How a fresh parameter is filled: a pattern where there is one, else normal with mean 0, else (`std` is 0) a constant."""

    std: float = 0.0
    constant: float = 0.0
    pattern: Callable[[tuple[int, ...]], Tensor] | None = None
    """The full tensor of a shape."""


ZEROS, ONES = Init(), Init(constant=1.0)


def declare_parameter(
    full_shape: tuple[int, ...],
    init: Init,
    tensor_parallel: TensorParallel,
    shard_dim: int | None = None,
    *,
    weight_decay: bool = True,
) -> nn.Parameter:
    """An uninitialised parameter of this rank's shape that carries `shard_spec`, `init` and DeepSpeed's mark of sharded ones.

    weight_decay False exempts a matrix from the optimizer's weight decay (vectors are exempt anyhow).
    """
    spec = ShardSpec(shard_dim, tuple(full_shape))
    parameter = nn.Parameter(torch.empty(local_shape(spec, tensor_parallel.size)))
    parameter.shard_spec = spec
    parameter.init = init
    parameter.no_weight_decay = not weight_decay
    if shard_dim is not None:
        parameter.tensor_model_parallel = True  # without it DeepSpeed's gradient norm counts one rank's piece only
    return parameter


def full_numel(parameter: nn.Parameter) -> int:
    """Number of elements of the whole parameter, padding left out."""
    return math.prod(parameter.shard_spec.full_shape)


def local_shape(spec: ShardSpec, size: int) -> tuple[int, ...]:
    """Shape of one rank's piece, padding included (every rank's is the same)."""
    if spec.dim is None:
        return spec.full_shape
    rows = -(-spec.full_shape[spec.dim] // size)
    return (*spec.full_shape[: spec.dim], rows, *spec.full_shape[spec.dim + 1 :])


def shard_range(spec: ShardSpec, rank: int, size: int) -> tuple[int, int]:
    """First and last + 1 row along `spec.dim` that the rank holds; padding is not among them, so the range may be short or empty."""
    total, rows = spec.full_shape[spec.dim], local_shape(spec, size)[spec.dim]
    return min(rank * rows, total), min((rank + 1) * rows, total)


def shard_index(spec: ShardSpec, rank: int, size: int) -> Index:
    """The rank's piece as an index into the full tensor."""
    whole = [slice(0, length) for length in spec.full_shape]
    if spec.dim is not None:
        whole[spec.dim] = slice(*shard_range(spec, rank, size))
    return tuple(whole)


def shard(full: Tensor, spec: ShardSpec, rank: int, size: int) -> Tensor:
    """The rank's piece of `full`, padded with zeros to `local_shape`."""
    if tuple(full.shape) != spec.full_shape:
        raise ValueError(f"tensor of shape {tuple(full.shape)} where {spec.full_shape} is expected")
    return _pad(full[shard_index(spec, rank, size)], spec, size)


def unshard(shards: list[Tensor], spec: ShardSpec) -> Tensor:
    """The full tensor from the pieces of all ranks in order; padding is dropped."""
    if spec.dim is None:
        return shards[0]
    return torch.cat(shards, dim=spec.dim).narrow(spec.dim, 0, spec.full_shape[spec.dim])


def _pad(piece: Tensor, spec: ShardSpec, size: int) -> Tensor:
    shape = local_shape(spec, size)
    if tuple(piece.shape) == shape:
        return piece
    padded = piece.new_zeros(shape)
    padded[tuple(slice(0, length) for length in piece.shape)] = piece
    return padded


def named_specs(model: nn.Module) -> Iterator[tuple[str, ShardSpec]]:
    """Name and ShardSpec of every parameter, each shared parameter once."""
    for name, parameter in model.named_parameters():
        yield name, parameter.shard_spec


@torch.no_grad()
def load_parameters(model: nn.Module, read: Callable[[str, Index], Tensor], tensor_parallel: TensorParallel) -> None:
    """Fill every parameter with `read(name, index)`, this rank's piece of the full tensor of that name, in the parameter's own dtype.

    `read` is asked for no more than the piece, and not at all for a piece that is all padding.
    """
    for name, parameter in model.named_parameters():
        try:
            piece = read_shard(functools.partial(read, name), parameter.shard_spec, tensor_parallel.rank, tensor_parallel.size)
        except ShapeError as error:
            raise InputError(f"parameter {name}: {error}") from None
        parameter.copy_(piece)


class ShapeError(ValueError):
    """A piece that was read is not of the shape that was asked for."""


def read_shard(read: Callable[[Index], Tensor], spec: ShardSpec, rank: int, size: int) -> Tensor:
    """The rank's piece, padded to `local_shape`, from `read(index)`, which is asked for no more than that and never for padding alone.

    Raises ShapeError if `read` gives another shape than the index has.
    """
    index = shard_index(spec, rank, size)
    shape = tuple(part.stop - part.start for part in index)
    if 0 in shape:
        return torch.zeros(local_shape(spec, size))
    piece = read(index)
    if tuple(piece.shape) != shape:
        raise ShapeError(f"got a piece of shape {tuple(piece.shape)} where {shape} is expected")
    return _pad(piece, spec, size)
