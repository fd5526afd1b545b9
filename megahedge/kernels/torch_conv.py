"""The definition of the causal convolution, in torch: as fast as a grouped convolution, for a few taps."""

# b batch, t seq_len, d channels, k conv_kernel (number of taps)

import torch
from torch import Tensor

from megahedge.kernels.conv_problem import ConvBackend, ConvInputs, ConvProblem


def run(inputs: ConvInputs) -> Tensor:
    """y [b, t, d], tap by tap in x.dtype.  With the current token's tap first, an identity filter gives back x bit for bit."""
    seq_len, num_taps, documents = inputs.x.shape[1], inputs.problem.num_taps, inputs.documents
    padded = torch.cat((inputs.initial, inputs.x), dim=1)
    y = None
    for tap in reversed(range(num_taps)):
        seen = padded[:, tap : tap + seq_len]
        if documents is not None and tap < num_taps - 1:
            seen = seen.masked_fill((documents[:, tap : tap + seq_len] != documents[:, num_taps - 1 :]).unsqueeze(-1), 0.0)
        term = seen * inputs.weight[:, tap]
        y = term if y is None else y + term
    return y if inputs.bias is None else y + inputs.bias


def supports(problem: ConvProblem) -> str | None:
    """It runs everything."""
    return None


BACKEND = ConvBackend("torch", supports, run)
