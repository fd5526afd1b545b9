"""Launching the kernels for decays that differ between the channels of V (triton_channel_kernels.py)."""

# b batch, t seq_len, h num_local_heads, n state_size, p head_dim, i tiles along n, j tiles along p

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megahedge.kernels import triton_channel_kernels as kernels
from megahedge.kernels.loop import CHECKPOINT_INTERVAL
from megahedge.kernels.normaliser import normalise
from megahedge.kernels.problem import ScanInputs, ScanOutputs
from megahedge.kernels.tiles import channel_tile
from megahedge.kernels.triton_launch import capability_of, layers_of, like, on_device_of, part_of, put_sum

_FEATURES = 1 << 31
"""Numbers of a sequence whose places are no 32-bit numbers any more."""
_PROGRAMS = 512
"""About two rounds of what a large GPU runs at once; sequences beyond that are worked on later, in the same workspace."""


def run(inputs: ScanInputs) -> ScanOutputs:
    """Shapes as in ScanInputs; what has no recurrence is left to autograd."""
    V, rate, state_size = inputs.V, inputs.rate, inputs.C.shape[-1]
    by_state = inputs.problem.step_axis == "state"
    step = inputs.step.squeeze(-1) if by_state else inputs.step.squeeze(-2).expand_as(V)
    rate = rate.expand(rate.shape[0], state_size, V.shape[-1])
    z = inputs.denominator
    outputs = _ChannelScan.apply(inputs.C, inputs.B, V, step, rate, inputs.numerator, z, inputs.boundaries, by_state)
    if z is None:
        return outputs[0], None, outputs[1], None
    numerator, denominator, h, z = outputs
    return normalise(numerator, denominator, inputs.eps), denominator, h, z


class _ChannelScan(torch.autograd.Function):
    """C, B [b, t, h, n], V [b, t, h, p], step like B or V, rate [1 | h, n, p], h and z [b, h, n, p], z and boundaries [b, t] or None.

    Returns numerator and denominator [b, t, h, p] and the last h and z; without z neither denominator nor z.
    """

    @staticmethod
    def forward(ctx, C, B, V, step, rate, h, z, boundaries, by_state):
        tensors = [x if x is None else x.contiguous() for x in (C, B, V, step, rate, h, z, boundaries)]
        ctx.save_for_backward(*tensors)
        ctx.by_state = by_state
        return channel_forward(*tensors, by_state=by_state)

    @staticmethod
    @once_differentiable
    def backward(ctx, *slopes):
        return *channel_backward(*ctx.saved_tensors, *slopes, by_state=ctx.by_state), None, None


def channel_forward(
    C: Tensor, B: Tensor, V: Tensor, step: Tensor, rate: Tensor, h: Tensor, z: Tensor | None, boundaries: Tensor | None, *, by_state: bool
) -> tuple[Tensor, ...]:
    """See _ChannelScan; all contiguous."""
    launch = _ChannelLaunch(C, V, rate, boundaries, by_state, z is not None)
    numerator, last_h = like(V), torch.empty_like(h)
    denominator, last_z = (like(V), torch.empty_like(z)) if launch.normalize else (None, None)
    for part in launch.slices():
        outputs = [launch.layers_n(x, part) for x in (numerator, denominator)]
        states = (part_of(x, part) for x in (h, z))
        launch("forward", part, C, B, V, step, rate, boundaries, *states, *outputs, *(part_of(x, part) for x in (last_h, last_z)))
        for whole, layers in zip((numerator, denominator), outputs, strict=True):
            put_sum(layers, whole, part)
    own = _own_weights(C, B, step, by_state)
    numerator.addcmul_(own, V if by_state else V * step)
    if not launch.normalize:
        return numerator, last_h
    return numerator, denominator.add_(own) if by_state else denominator.addcmul_(own, step), last_h, last_z


def channel_backward(
    C: Tensor,
    B: Tensor,
    V: Tensor,
    step: Tensor,
    rate: Tensor,
    h: Tensor,
    z: Tensor | None,
    boundaries: Tensor | None,
    *slopes: Tensor,
    by_state: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of C, B, V, step, rate, h and z from those of what channel_forward has returned."""
    launch = _ChannelLaunch(C, V, rate, boundaries, by_state, z is not None)
    slope, slope_z, grad_h, grad_z = slopes if launch.normalize else (slopes[0], None, slopes[1], None)
    slope, slope_z = (x if x is None else x.contiguous() for x in (slope, slope_z))
    grad_h, grad_z = (x if x is None else x.clone(memory_format=torch.contiguous_format) for x in (grad_h, grad_z))
    grad_C, grad_B, grad_V, grad_step = (like(x) for x in (C, B, V, step))
    grad_rate = torch.zeros(V.shape[2], *rate.shape[1:], dtype=torch.float32, device=V.device)
    for part in launch.slices():
        inputs = (C, B, V, step, rate, boundaries)
        by_head, since = launch.per_head(h[part]), like(step[part])
        left, left_z = (launch.stretches(x, part) for x in (h, z))
        layers_C, layers_B, layers_V = launch.layers_p(grad_C, part), launch.layers_p(grad_B, part), launch.layers_n(grad_V, part)
        layers_step = (launch.layers_p if by_state else launch.layers_n)(grad_step, part)
        rated = torch.empty_like(layers_step)
        starts, tangents = (part_of(h, part), part_of(z, part)), (part_of(slope, part), part_of(slope_z, part))
        launch("sweep_forwards", part, *inputs, *starts, *tangents, layers_C, rated, since, by_head, left, left_z)
        put_sum(layers_C, grad_C, part)
        del layers_C
        adjoints = (part_of(grad_h, part), part_of(grad_z, part))
        launch("sweep_backwards", part, *inputs, *tangents, rated, since, left, left_z, *adjoints, by_head, layers_step, layers_B, layers_V)
        for layers, whole in ((layers_step, grad_step), (layers_B, grad_B), (layers_V, grad_V)):
            put_sum(layers, whole, part)
        grad_rate += by_head.sum(0)
    _add_own(C, B, V, step, slope, slope_z, grad_C, grad_B, grad_V, grad_step, by_state=by_state)
    return grad_C, grad_B, grad_V, grad_step, grad_rate.sum_to_size(rate.shape), grad_h, grad_z


def _own_weights(C: Tensor, B: Tensor, step: Tensor, by_state: bool) -> Tensor:
    """What a token gives to itself of what it takes in, [b, t, h, 1]."""
    return (C.float() * (B * step if by_state else B)).sum(dim=-1, keepdim=True)


def _add_own(C, B, V, step, slope, slope_z, grad_C, grad_B, grad_V, grad_step, *, by_state: bool) -> None:
    """What the kernels leave out of the gradients: what each token gives to itself."""
    weights = _own_weights(C, B, step, by_state)
    if by_state:
        slope_of_weights = (slope * V).sum(dim=-1, keepdim=True)
        slope_of_weights = slope_of_weights if slope_z is None else slope_of_weights + slope_z.sum(dim=-1, keepdim=True)
        grad_C.addcmul_(slope_of_weights, B * step)
        grad_B.addcmul_(slope_of_weights, C * step)
        grad_step.addcmul_(slope_of_weights, C.float() * B)
        grad_V.addcmul_(weights, slope)
        return
    by_step = slope * V if slope_z is None else slope * V + slope_z
    slope_of_weights = (by_step * step).sum(dim=-1, keepdim=True)
    grad_C.addcmul_(slope_of_weights, B)
    grad_B.addcmul_(slope_of_weights, C)
    grad_step.addcmul_(weights, by_step)
    grad_V.addcmul_(weights, slope * step)


class _ChannelLaunch:
    """Starts the kernels of triton_channel.py on some sequences at a time, so that their workspace does not grow with the batch."""

    def __init__(self, C: Tensor, V: Tensor, rate: Tensor, boundaries: Tensor | None, by_state: bool, normalize: bool):
        self.batch, self.seq_len, self.heads, state_size = C.shape
        head_dim = V.shape[-1]
        self.tile = channel_tile(state_size, head_dim, capability_of(C))
        self.tiles_p, self.tiles_n = -(-head_dim // self.tile.channels), -(-state_size // self.tile.states)
        self.rate_heads, self.normalize = rate.shape[0], normalize
        self._constants = {"N": state_size, "P": head_dim, "BLOCK_N": self.tile.states, "BLOCK_P": self.tile.channels}
        self._constants |= {"BY_STATE": by_state, "NORMALIZE": normalize, "HAS_RESETS": boundaries is not None}

    def slices(self) -> Iterator[slice]:
        """The sequences of each launch."""
        at_once = max(1, _PROGRAMS // (self.heads * self.tiles_p * self.tiles_n))
        return (slice(first, min(first + at_once, self.batch)) for first in range(0, self.batch, at_once))

    def layers_n(self, whole: Tensor | None, part: slice) -> Tensor | None:
        """[i, b, t, h, p]: where each tile along n puts its share of a result [b, t, h, p]."""
        return layers_of(whole, part, self.tiles_n)

    def layers_p(self, whole: Tensor | None, part: slice) -> Tensor | None:
        """[j, b, t, h, n]: the same of tiles along p."""
        return layers_of(whole, part, self.tiles_p)

    def per_head(self, state: Tensor) -> Tensor:
        """Room for a gradient of the rate, [b, h, n, p]."""
        return torch.empty_like(state, dtype=torch.float32)

    def stretches(self, state: Tensor | None, part: slice) -> Tensor | None:
        """Room for one state a stretch, tile by tile, [b, h, j, i, s, states, channels]."""
        if state is None:
            return None
        tiles = (self.tiles_p, self.tiles_n, -(-self.seq_len // CHECKPOINT_INTERVAL), self.tile.states, self.tile.channels)
        return state.new_empty(*state[part].shape[:2], *tiles)

    def __call__(self, kernel: str, part: slice, C, B, V, step, rate, boundaries, *others: Tensor | None) -> None:
        inputs = (*(x[part] for x in (C, B, V, step)), rate, part_of(boundaries, part), *others)
        sweep = {} if kernel == "forward" else {"STRETCH": CHECKPOINT_INTERVAL}
        if kernel == "sweep_backwards":
            sweep["WIDE"] = C[0].numel() >= _FEATURES or V[0].numel() >= _FEATURES
        warps = self.tile.warps_backwards if kernel == "sweep_backwards" else self.tile.warps
        grid = ((part.stop - part.start) * self.heads, self.tiles_p, self.tiles_n)
        with on_device_of(C):
            getattr(kernels, kernel)[grid](
                *inputs, self.seq_len, self.heads, self.rate_heads, **self._constants, **sweep, num_warps=warps, num_stages=3
            )
