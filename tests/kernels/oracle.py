"""The scan a second time, as attention: the weight of every pair of tokens, in fp64, O(seq_len^2).

Nothing here is shared with megahedge.kernels, so that a mistake in its reference cannot hide.
"""

# b batch, i and j tokens, h heads, n state_size, p head_dim

import torch


def attention_form(C, B, V, step=None, rate=None, *, initial=None, boundaries=None):
    """Outputs C_i h_i and C_i z_i [b, t, h, p], and the last h and z [b, h, n, p], all with the channels written out.

    step [b, t, h, n | 1, p | 1], rate [h | 1, n | 1, p | 1], initial (h, z) both [b, h, n, p | 1].
    """
    batch, seq_len, heads, state_size = C.shape
    full = (batch, seq_len, heads, state_size, V.shape[-1])
    step = C.new_ones(full) if step is None else step.expand(full)
    age = C.new_zeros(full) if rate is None else (step * rate).cumsum(dim=1)  # total decay up to and including a token
    document = C.new_zeros(batch, seq_len) if boundaries is None else boundaries.to(C.dtype).cumsum(dim=1)

    order = torch.arange(seq_len)
    visible = (order[:, None] >= order[None, :]) & (document[:, :, None] == document[:, None, :])  # [b, i, j]
    exponent = (age[:, None] - age[:, :, None]).masked_fill(~visible[..., None, None, None], -torch.inf)  # [b, i, j, h, n, p]
    weight = exponent.exp() * (step * B.unsqueeze(-1))[:, None]
    h = torch.einsum("bijhnp,bjhp->bihnp", weight, V)
    z = weight.sum(dim=2)
    if initial is not None:
        carried = (-age).exp() * (document == 0)[..., None, None, None]
        h = h + carried * initial[0][:, None]
        z = z + carried * initial[1][:, None]
    return (C.unsqueeze(-1) * h).sum(dim=-2), (C.unsqueeze(-1) * z).sum(dim=-2), h[:, -1], z[:, -1]
