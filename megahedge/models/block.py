"""One layer: a token mixer and an MLP, each behind a layer norm, on a residual stream."""

from collections.abc import Callable

from torch import Tensor, nn

from megahedge.config.model import ModelConfig
from megahedge.models.context import SequenceContext
from megahedge.models.mixers import MIXERS
from megahedge.models.mlp import MLP
from megahedge.models.norms import LayerNorm
from megahedge.parallel.collectives import copy_to_tp
from megahedge.parallel.layers import reduce_partial_sums
from megahedge.parallel.topology import TensorParallel

Mix = Callable[[Tensor, SequenceContext], tuple[Tensor, Tensor | None]]
"""A Mixer, or what is called like one."""


class Block(nn.Module):
    """hidden + mixer(norm(hidden)) + mlp(norm(hidden)) (parallel residual), or one after the other.

    Collectives.  The parallel form adds the partial sums of mixer and MLP and reduces ONCE; in the backward the gradient of the
    norms' common input is reduced once too, because its copy stands before both norms.  The norms' own gradients are partial sums
    then and are reduced by the norms: 2 * hidden_size numbers each, against b * t * hidden_size for a second copy behind them.
    The sequential form needs two reduces in any case; there the copies stand behind the norms, whose gradients are complete.
    """

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel, layer_index: int):
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.parallel_residual = config.parallel_residual

        def norm():
            return LayerNorm(config.hidden_size, config.norm_eps, tensor_parallel, partial_gradients=config.parallel_residual)

        self.mixer_norm = norm()
        self.mixer = MIXERS[config.mixer.kind](config, tensor_parallel, layer_index)
        self.mlp_norm = norm()
        self.mlp = MLP(config, tensor_parallel)

    def forward(self, hidden: Tensor, context: SequenceContext, mix: Mix | None = None) -> Tensor:
        """hidden [b, t, hidden_size], replicated → the same; `mix` stands in for the mixer where it is given."""
        run = self._parallel if self.parallel_residual else self._sequential
        return run(hidden, context, mix or self.mixer)

    def _parallel(self, hidden: Tensor, context: SequenceContext, mix: Mix) -> Tensor:
        shared = copy_to_tp(hidden, self.tensor_parallel)
        mixed, mixer_bias = mix(self.mixer_norm(shared), context)
        fed, mlp_bias = self.mlp(self.mlp_norm(shared))
        return hidden + reduce_partial_sums(mixed + fed, (mixer_bias, mlp_bias), self.tensor_parallel)

    def _sequential(self, hidden: Tensor, context: SequenceContext, mix: Mix) -> Tensor:
        mixed, mixer_bias = mix(copy_to_tp(self.mixer_norm(hidden), self.tensor_parallel), context)
        hidden = hidden + reduce_partial_sums(mixed, (mixer_bias,), self.tensor_parallel)
        fed, mlp_bias = self.mlp(copy_to_tp(self.mlp_norm(hidden), self.tensor_parallel))
        return hidden + reduce_partial_sums(fed, (mlp_bias,), self.tensor_parallel)
