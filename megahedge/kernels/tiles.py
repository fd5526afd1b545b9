"""How the Triton kernels cut a head's states into tiles: a plain table, so that nothing has to be tuned before a run can start.

tests/gpu/compile_table.py compiles every line for every architecture and prints registers, stack, shared memory and instructions.
"""

import dataclasses

import torch

WARP = 32
"""Threads."""


@dataclasses.dataclass(frozen=True)
class ChannelTile:
    """Of the kernels for decays that differ between channels: states of a program, all in its registers, and its warps."""

    states: int
    channels: int
    warps: int
    warps_backwards: int
    """Of the sweep backwards, which holds most."""


_STATES_PER_THREAD = 32
"""At 64 the backward needs more registers than a thread has."""
_CHANNEL_TILES = {
    # no state of 160 and 80 may be idle: half as many a thread cost less than a fifth of the tile
    (160, 80): ChannelTile(32, 16, 1, 1),
}
"""By state size and head_dim, where the rule below is not the best."""


def channel_tile(state_size: int, head_dim: int, capability: int) -> ChannelTile:
    """128 states by 32 channels in four warps, or as many as there are; capability: of the GPU, such as 90.

    From sm_100 on the compiler makes pairs of fp32 numbers, for which the sweep backwards lacks registers: it gets more warps.
    """
    states, channels = min(128, _power_of_2(state_size)), min(32, _power_of_2(head_dim))
    warps = max(1, states * channels // (_STATES_PER_THREAD * WARP))
    tile = _CHANNEL_TILES.get((state_size, head_dim), ChannelTile(states, channels, warps, warps))
    return dataclasses.replace(tile, warps_backwards=min(8, 4 * tile.warps)) if capability >= 100 else tile


@dataclasses.dataclass(frozen=True)
class ChunkTile:
    """Of the kernels that work on chunks of tokens by matrix products: tokens of a chunk, states and channels of a tile, and warps."""

    tokens: int
    states: int
    channels: int
    warps: int
    stages: int
    """Of loads that are under way while products are made."""
    states_of_features: int
    """Instead of `states` in the gradients of features, which hold most."""


def chunk_tile(state_size: int, head_dim: int, dtype: torch.dtype, capability: int) -> ChunkTile:
    """What leaves no thread short of registers: chunks of 64 tokens for V in bf16, of 32 before sm_90.

    Where V is no bf16, products are made by three or of wider operands, which takes short chunks and small tiles, at least two along p.
    """
    if dtype != torch.bfloat16:
        channels = min(32, _side(max(16, head_dim // 2)))
        return ChunkTile(16, min(32, _side(state_size)), channels, 4, 3, min(32, _side(state_size)))
    states, channels = _side(state_size), _side(head_dim)
    if capability < 90:
        return ChunkTile(32, states, channels, 8, 2, states)
    # what holds most has half a tile, but on sm_100, whose products read from memory of their own and leave registers free
    return ChunkTile(64, states, channels, 8, 1 if channels == 16 else 2, min(32, states) if capability < 100 else states)


def state_chunk_tile(state_size: int, head_dim: int, dtype: torch.dtype, capability: int) -> ChunkTile:
    """Chunks of 16 tokens, the shortest that products of matrices take, since each pair of tokens costs an exponential for each n."""
    small = chunk_tile(state_size, head_dim, torch.float32, capability)
    if dtype == torch.bfloat16:
        return small
    return dataclasses.replace(small, states_of_features=16, stages=2 if capability < 100 else 3)


def _side(size: int) -> int:
    """Of a tile: 16, which a matrix product needs at least, 32 or 64, the largest that divides the size, or the smallest that covers it."""
    for side in (64, 32, 16):
        if size % side == 0:
            return side
    return max(16, min(64, _power_of_2(size)))


def _power_of_2(size: int) -> int:
    """The smallest that is not below `size`."""
    return 1 << (size - 1).bit_length()
