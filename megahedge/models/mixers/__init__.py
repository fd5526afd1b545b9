"""Token mixers by name; a block is built with any of them."""

from megahedge.models.mixers.base import Mixer
from megahedge.models.mixers.softmax import SoftmaxAttention

MIXERS: dict[str, type[Mixer]] = {"softmax": SoftmaxAttention}
