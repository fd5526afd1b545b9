"""Scan by matrix products over chunks of tokens, for decays that the channels of V share.

Within a chunk the outputs are those of masked linear attention, with the decay between two tokens as a factor of their weight; a
state [n, p] is carried from chunk to chunk.  Every exponent is a sum of log decays (<= 0) over the very tokens that it spans, so no
exponential overflows and no difference of large sums loses digits, however strong the decay.
"""

# b batch, t seq_len, h num_local_heads, n state_size, p head_dim, c number of chunks, T tokens of a chunk

import torch
from torch import Tensor
from torch.nn.functional import pad

from megahedge.kernels.problem import Backend, Problem, ScanInputs, ScanOutputs

CHUNK_SIZE = 64


def run(inputs: ScanInputs) -> ScanOutputs:
    """All torch operations; autograd gives the gradients."""
    seq_len = inputs.C.shape[1]
    chunk_size = min(CHUNK_SIZE, 1 << (seq_len - 1).bit_length())
    keys, values = _weighted_inputs(inputs)
    state = inputs.numerator if inputs.denominator is None else torch.cat((inputs.numerator, inputs.denominator), dim=-1)
    C, B, X = (_split(x, chunk_size) for x in (inputs.C, keys, values))
    log_decay = None
    if inputs.rate is not None:
        log_decay = _split(-inputs.rate.squeeze(-1) * inputs.step.squeeze(-1), chunk_size)  # [b, h, c, T, 1 | n]
    documents = None if inputs.boundaries is None else _split(inputs.boundaries[:, :, None, None].long(), chunk_size).cumsum(dim=-2)

    outputs, state = _scan_chunks(C, B, X, log_decay, documents, state)
    outputs = outputs.flatten(2, 3)[:, :, :seq_len].transpose(1, 2)  # [b, t, h, columns]
    if inputs.denominator is None:
        return outputs, None, state, None
    head_dim = inputs.problem.head_dim
    return outputs[..., :head_dim], outputs[..., head_dim:], state[..., :head_dim], state[..., head_dim:]


def _weighted_inputs(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """B and V with the step multiplied into the one that has its axis; V followed by the denominator's column or columns."""
    B, V = inputs.B, inputs.V
    if inputs.problem.step_axis == "channel":
        unit = inputs.step.squeeze(-2)
        V = V * unit
    else:
        unit = V.new_ones(1).expand(*V.shape[:-1], 1)
        if inputs.problem.step_axis is not None:
            B = B * inputs.step.squeeze(-1)
    return B, torch.cat((V, unit), dim=-1) if inputs.problem.normalize else V


def _split(x: Tensor, chunk_size: int) -> Tensor:
    """[b, t, h, d] -> [b, h, c, T, d].  The last chunk is filled up with zeros: tokens that add nothing and decay nothing."""
    missing = -x.shape[1] % chunk_size
    return pad(x.transpose(1, 2), (0, 0, 0, missing)).unflatten(2, (-1, chunk_size))


def _scan_chunks(
    C: Tensor, B: Tensor, X: Tensor, log_decay: Tensor | None, documents: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [b, h, c, T, columns] and the state after the last chunk.

    log_decay [b, h, c, T, 1 | n]; documents [b, 1, c, T, 1]: number of document starts in the chunk so far.
    """
    weights = _pair_weights(C, B, log_decay, documents)  # [b, h, c, T, T]
    chunk_decay = None
    if log_decay is not None:
        C = C * _sums_up_to(log_decay).exp()
        B = B * _sums_after(log_decay).exp()
        chunk_decay = log_decay.sum(dim=-2).exp().unsqueeze(-1)  # [b, h, c, 1 | n, 1]
    if documents is not None:
        last = documents[..., -1:, :]
        C = C * (documents == 0)
        B = B * (documents == last)
        chunk_decay = (last == 0) * (1.0 if chunk_decay is None else chunk_decay)
    states = []
    for chunk, update in enumerate((B.mT @ X).unbind(dim=2)):
        states.append(state)
        state = update + (state if chunk_decay is None else state * chunk_decay[:, :, chunk])
    return weights @ X + C @ torch.stack(states, dim=2), state


def _pair_weights(C: Tensor, B: Tensor, log_decay: Tensor | None, documents: Tensor | None) -> Tensor:
    """Weight of token j in the output of token i of the same chunk and document, 0 for j > i: [b, h, c, T, T]."""
    chunk_size = C.shape[-2]
    if log_decay is not None and log_decay.shape[-1] > 1:
        weights = _decayed_products(C, B, log_decay)
    else:
        weights = C @ B.mT
        if log_decay is not None:
            weights = weights * _sums_between(log_decay.squeeze(-1)).exp()
    visible = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=C.device).tril()
    if documents is not None:
        visible = visible & (documents == documents.mT)
    return weights.masked_fill(~visible, 0.0)


def _decayed_products(C: Tensor, B: Tensor, log_decay: Tensor) -> Tensor:
    """sum_n C_i B_j exp(sum of log_decay over j < k <= i) for j <= i, where the decay differs between the n: [..., T, T].

    By halving: between a token of the second half and one of the first, the sum parts at the middle into one factor for each, so
    that the corner is a matrix product; the two halves are the same problem again.  log2(T) times as many exponentials as there
    are inputs, instead of T times.
    """
    size = C.shape[-2]
    if size == 1:
        return (C * B).sum(dim=-1, keepdim=True)
    C, B, log_decay = (x.unflatten(-2, (2, size // 2)) for x in (C, B, log_decay))
    later = C[..., 1, :, :] * _sums_up_to(log_decay[..., 1, :, :]).exp()
    earlier = B[..., 0, :, :] * _sums_after(log_decay[..., 0, :, :]).exp()
    corner = later @ earlier.mT
    first, second = _decayed_products(C, B, log_decay).unbind(dim=-3)
    return torch.cat((pad(first, (0, size // 2)), torch.cat((corner, second), dim=-1)), dim=-2)


def _sums_between(x: Tensor) -> Tensor:
    """[..., T] -> [..., T, T]: sum of x over j < k <= i; 0 for j >= i."""
    x = x.unsqueeze(-1)
    return _sums_up_to(x * _ones_like_pairs(x).tril(-1))


def _sums_up_to(x: Tensor) -> Tensor:
    """[..., T, d] -> [..., T, d]: sum of x over k <= i.  By matrix product: the gradient of cumsum flips its input, which is slow."""
    return _ones_like_pairs(x).tril() @ x


def _sums_after(x: Tensor) -> Tensor:
    """[..., T, d] -> [..., T, d]: sum of x over k > j."""
    return _ones_like_pairs(x).triu(1) @ x


def _ones_like_pairs(x: Tensor) -> Tensor:
    return x.new_ones(x.shape[-2], x.shape[-2])


def supports(problem: Problem) -> str | None:
    """Refuses decays that differ between channels: they are no factor of a pair's weight."""
    return "its decay differs between the channels of V" if problem.decay_per_channel else None


BACKEND = Backend("chunked", supports, run)
