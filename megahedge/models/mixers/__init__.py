"""Token mixers by the kind that a MixerConfig names; a block is built with any of them."""

from megahedge.models.mixers.base import Mixer
from megahedge.models.mixers.hedge_mamba import HedgeMamba
from megahedge.models.mixers.hedgehog import HedgehogAttention
from megahedge.models.mixers.mamba import Mamba
from megahedge.models.mixers.softmax import SoftmaxAttention

MIXERS: dict[str, type[Mixer]] = {
    "softmax": SoftmaxAttention,
    "hedgehog": HedgehogAttention,
    "hedge_mamba": HedgeMamba,
    "mamba": Mamba,
}
