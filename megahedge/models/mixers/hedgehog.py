"""Linear attention with Hedgehog feature maps: stage 1's mixer."""

# b batch, t seq_len, h num_local_heads, p head_dim, n state_size = 2 p

from torch import Tensor

from megahedge.config.model import ModelConfig
from megahedge.kernels import scan
from megahedge.models.context import SequenceContext
from megahedge.models.mixers.feature_maps import HedgehogMap
from megahedge.models.mixers.softmax import SoftmaxAttention
from megahedge.parallel.topology import TensorParallel


class HedgehogAttention(SoftmaxAttention):
    """The teacher's projections around y = φ(q) (φ(k) ⊗ v) / φ(q) φ(k) (Attention to Mamba, equations 4, 6, 9 and 10)."""

    def __init__(self, config: ModelConfig, tensor_parallel: TensorParallel, layer_index: int):
        super().__init__(config, tensor_parallel, layer_index)
        self.rotates_features = config.mixer.rope == "after"
        self.normalizer_eps = config.mixer.normalizer_eps
        self.query_map = HedgehogMap(config, tensor_parallel)
        self.key_map = HedgehogMap(config, tensor_parallel)

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        return self.project_out(self.linear_attention(*self.project(hidden), context))

    def teacher(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        """What the teacher's mixer makes of it, with the same projections."""
        return super().forward(hidden, context)

    def features(self, q: Tensor, k: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:
        """C and B of the scan, [b, t, h, n], from q and k as projected, [b, t, h, p].

        Rotating features (Listing 2) gives them signs, and the normaliser may come near 0; rotating q and k keeps all positive.
        """
        rotate = context.rotary.rotate
        if self.rotates_features:
            return rotate(self.query_map(q)), rotate(self.key_map(k))
        return self.query_map(rotate(q), stored=q.dtype), self.key_map(rotate(k), stored=k.dtype)

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """What stands in for `softmax_attention`: q, k, v as projected → [b, t, h, p]."""
        C, B = self.features(q, k, context)
        mixed, _ = scan(C, B, v, boundaries=context.boundaries, eps=self.normalizer_eps, stats=context.stats)
        return mixed
