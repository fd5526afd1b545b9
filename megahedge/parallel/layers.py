"""The three linear maps that a TP group holds in pieces.  Full sizes are given; each rank makes its own piece."""

# b batch, t seq_len

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megahedge.parallel.collectives import copy_to_tp, reduce_from_tp
from megahedge.parallel.sharding import ZEROS, Init, declare_parameter, shard_range
from megahedge.parallel.topology import TensorParallel
from megahedge.utils.errors import InputError
from megahedge.utils.words import divisors, either


def divide(name: str, count: int, tensor_parallel: TensorParallel) -> int:
    """count / tp_size.  Raises InputError, naming the tp sizes that would do, unless it is whole."""
    if count % tensor_parallel.size:
        raise InputError(f"tp_size={tensor_parallel.size} does not divide {name}={count}; use {either(divisors(count))}")
    return count // tensor_parallel.size


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b with the output features cut over the ranks.

    The input is replicated and must already have passed `copy_to_tp` (one copy may serve several such layers); the output is this
    rank's [..., out_features / tp_size].
    """

    def __init__(self, in_features: int, out_features: int, tensor_parallel: TensorParallel, *, std: float, bias: bool = True):
        super().__init__()
        divide("out_features", out_features, tensor_parallel)
        self.weight = declare_parameter((out_features, in_features), Init(std), tensor_parallel, shard_dim=0)
        self.bias = declare_parameter((out_features,), ZEROS, tensor_parallel, shard_dim=0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with the input features cut over the ranks; the bias is replicated.

    `forward` returns this rank's PARTIAL sum and the bias (or None).  The caller reduces, once for as many partial sums as it adds
    up, and adds the bias after that, so that it counts once; `reduce_partial_sums` does both.
    """

    def __init__(self, in_features: int, out_features: int, tensor_parallel: TensorParallel, *, std: float, bias: bool = True):
        super().__init__()
        divide("in_features", in_features, tensor_parallel)
        self.weight = declare_parameter((out_features, in_features), Init(std), tensor_parallel, shard_dim=1)
        self.bias = declare_parameter((out_features,), ZEROS, tensor_parallel) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        # a copy of the bias, because ZeRO-3 takes the parameter's storage away when this forward ends
        return F.linear(x, self.weight), None if self.bias is None else self.bias.clone()


def reduce_partial_sums(partial: Tensor, biases: tuple[Tensor | None, ...], tensor_parallel: TensorParallel) -> Tensor:
    """The sum of `partial` over the group plus the replicated biases, each once."""
    total = reduce_from_tp(partial, tensor_parallel)
    present = [bias for bias in biases if bias is not None]
    return total + sum(present[1:], present[0]) if present else total


class VocabParallelEmbedding(nn.Module):
    """Table look-up with the rows cut over the ranks; rows beyond `num_embeddings` are padding that no token names."""

    def __init__(self, num_embeddings: int, embedding_dim: int, tensor_parallel: TensorParallel, *, std: float):
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.weight = declare_parameter((num_embeddings, embedding_dim), Init(std), tensor_parallel, shard_dim=0)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [b, t] int64 → [b, t, embedding_dim], the same on every rank."""
        if self.tensor_parallel.size == 1:
            return F.embedding(tokens, self.weight)
        first, last = shard_range(self.weight.shard_spec, self.tensor_parallel.rank, self.tensor_parallel.size)
        foreign = (tokens < first) | (tokens >= last)
        rows = F.embedding((tokens - first).masked_fill(foreign, 0), self.weight)
        return reduce_from_tp(rows.masked_fill(foreign.unsqueeze(-1), 0), self.tensor_parallel)


class VocabParallelHead(nn.Module):
    """Logits of this rank's part of the vocabulary; shares the embedding's parameter where embeddings are tied."""

    def __init__(self, hidden_size: int, vocab_size: int, tensor_parallel: TensorParallel, *, std: float, tied: nn.Parameter | None = None):
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.weight = declare_parameter((vocab_size, hidden_size), Init(std), tensor_parallel, shard_dim=0) if tied is None else tied

    def forward(self, hidden: Tensor, measure: Callable | None = None):
        """hidden [b, t, hidden_size], replicated → [b, t, ceil(vocab_size / tp_size)].

        With `measure`, what that function makes of the hidden states and the weight, in place of all logits: here, because ZeRO-3
        has the weight whole only while the module is called.
        """
        return (measure or F.linear)(copy_to_tp(hidden, self.tensor_parallel), self.weight)
