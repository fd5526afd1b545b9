"""megahedge: turn a pretrained softmax-attention transformer into an attention-free HedgeMamba of the same size."""

__version__ = "0.1.0"
