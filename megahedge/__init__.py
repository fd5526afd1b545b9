"""megahedge: turn a pretrained softmax-attention transformer into an attention-free HedgeMamba of the same size."""

import os

__version__ = "0.1.0"

# Huge pages for torch's tensors in the memory of the CPU, where the kernel has any: with small ones a scan over 8192 tokens spends a
# tenth of its time on page faults.  torch reads the variable at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
