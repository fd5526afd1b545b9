"""Triton kernels of the scan whose decay differs between the channels of V; launched by triton_channel.py.

The mathematics is that of loop.py.  A program holds a tile of states, some n by some channels of one head of one sequence, in registers and
walks along the sequence.  Sums over n of which it has only a part, and sums over channels, go to a workspace with one layer a tile and are
added up afterwards, always in the same order.  What a token gives to itself is left out of all of them, as in loop.py.

Two things differ from loop.py.  The step is multiplied in here: into B where it lies on the state axis (BY_STATE), else into V, whose
denominator then takes in the step itself.  And a boundary costs nothing, as it is an exponent of minus infinity.
"""

# b batch, t seq_len, h heads, n state_size, p head_dim, i tiles along n, j tiles along p, s stretches

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _row(pointer, places, inside, EVEN: tl.constexpr):
    """A row of numbers in fp32, zeros outside; EVEN where none of the places is."""
    if EVEN:
        return tl.load(pointer + places).to(tl.float32)
    else:
        return tl.load(pointer + places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _put(pointer, places, values, inside, EVEN: tl.constexpr):
    """Store a row or a tile but for what lies outside."""
    if EVEN:
        tl.store(pointer + places, values)
    else:
        tl.store(pointer + places, values, mask=inside)


@triton.jit
def _along_step(row, BY_STATE: tl.constexpr):
    """A row like a step, [n] or [p], spread over a tile."""
    return row[:, None] if BY_STATE else row[None, :]


@triton.jit
def _to_step(tile, BY_STATE: tl.constexpr):
    """Sum of a tile [n, p] over the axis that a step lacks."""
    return tl.sum(tile, 1) if BY_STATE else tl.sum(tile, 0)


@triton.jit
def _exponents(exponent, step, RESETS, place, BY_STATE: tl.constexpr, HAS_RESETS: tl.constexpr):
    """Logarithms to base 2 of one token's decays."""
    exponents = exponent * _along_step(step, BY_STATE)
    if HAS_RESETS:
        exponents += tl.where(tl.load(RESETS + place) != 0, float("-inf"), 0.0)
    return exponents


@triton.jit
def _taken_in(b, v, step, BY_STATE: tl.constexpr):
    """What a token adds to states, as rows and columns: of both states, of the numerator, of the denominator."""
    if BY_STATE:
        return b * step, v, tl.zeros_like(v) + 1.0
    else:
        return b, v * step, step


@triton.jit
def forward(
    C, B, V, STEP, RATE, RESETS, H0, Z0, NUMERATOR, DENOMINATOR, H, Z, seq_len, heads, rate_heads,
    N: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    BY_STATE: tl.constexpr, NORMALIZE: tl.constexpr, HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """C, B [b, t, h, n], V [b, t, h, p], STEP like B or V, RATE [1 | h, n, p], RESETS [b, t], H0, Z0, H, Z [b, h, n, p];

    NUMERATOR, DENOMINATOR [i, b, t, h, p].  The grid is (b h, j, i), as in all kernels here.
    """
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_P: tl.constexpr = P % BLOCK_P == 0
    EVEN: tl.constexpr = EVEN_N and EVEN_P
    place = tl.program_id(0).to(tl.int64)
    batch, head = place // heads, place % heads
    p, n = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P), tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_p, in_n, cell = p < P, n < N, n[:, None] * P + p[None, :]
    inside = in_n[:, None] & in_p[None, :]
    exponent = _row(RATE + head % rate_heads * N * P, cell, inside, EVEN) * -_LOG2_E
    h = _row(H0 + place * N * P, cell, inside, EVEN)
    z = _row(Z0 + place * N * P, cell, inside, EVEN) if NORMALIZE else h
    row = batch * seq_len * heads + head
    layer = tl.program_id(2).to(tl.int64) * (tl.num_programs(0) // heads) * seq_len * heads
    for t in range(seq_len):
        c, b = _row(C + row * N, n, in_n, EVEN_N), _row(B + row * N, n, in_n, EVEN_N)
        v = _row(V + row * P, p, in_p, EVEN_P)
        step = _row(STEP + row * N, n, in_n, EVEN_N) if BY_STATE else _row(STEP + row * P, p, in_p, EVEN_P)
        decay = tl.exp2(_exponents(exponent, step, RESETS, batch * seq_len + t, BY_STATE, HAS_RESETS))
        keys, new, unit = _taken_in(b, v, step, BY_STATE)
        h *= decay
        _put(NUMERATOR + (layer + row) * P, p, tl.sum(c[:, None] * h, 0), in_p, EVEN_P)
        h += keys[:, None] * new[None, :]
        if NORMALIZE:
            z *= decay
            _put(DENOMINATOR + (layer + row) * P, p, tl.sum(c[:, None] * z, 0), in_p, EVEN_P)
            z += keys[:, None] * unit[None, :]
        row += heads
    _put(H + place * N * P, cell, h, inside, EVEN)
    if NORMALIZE:
        _put(Z + place * N * P, cell, z, inside, EVEN)


@triton.jit
def sweep_forwards(
    C, B, V, STEP, RATE, RESETS, H0, Z0, SLOPE, SLOPE_Z, GRAD_C, RATED, SINCE, GRAD_RATE, LEFT, LEFT_Z, seq_len, heads, rate_heads,
    N: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, STRETCH: tl.constexpr,
    BY_STATE: tl.constexpr, NORMALIZE: tl.constexpr, HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """The states once more, and what of the gradients follows from them.

    SLOPE, SLOPE_Z [b, t, h, p] gradients of numerator and denominator;  GRAD_C [j, b, t, h, n];  RATED [i, b, t, h, p], or by state
    [j, b, t, h, n];  SINCE like STEP, the steps since the stretch or the document began;  GRAD_RATE [b, h, n, p];
    LEFT, LEFT_Z [b, h, j, i, s, BLOCK_N, BLOCK_P], what is left of the states at the last token of a stretch, before that token adds to
    them, tile by tile.
    """
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_P: tl.constexpr = P % BLOCK_P == 0
    EVEN: tl.constexpr = EVEN_N and EVEN_P
    place = tl.program_id(0).to(tl.int64)
    batch, head = place // heads, place % heads
    p, n = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P), tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_p, in_n, cell = p < P, n < N, n[:, None] * P + p[None, :]
    inside = in_n[:, None] & in_p[None, :]
    exponent = _row(RATE + head % rate_heads * N * P, cell, inside, EVEN) * -_LOG2_E
    h = _row(H0 + place * N * P, cell, inside, EVEN)
    z = _row(Z0 + place * N * P, cell, inside, EVEN) if NORMALIZE else h
    grad_rate = tl.zeros([BLOCK_N, BLOCK_P], tl.float32)
    keys, new, unit = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_P], tl.float32), tl.zeros([BLOCK_P], tl.float32)
    row = batch * seq_len * heads + head
    rows = (tl.num_programs(0) // heads).to(tl.int64) * seq_len * heads
    layer_n, layer_p = tl.program_id(1) * rows, tl.program_id(2) * rows
    local = tl.arange(0, BLOCK_N)[:, None] * BLOCK_P + tl.arange(0, BLOCK_P)[None, :]
    tile = (place * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    left = tile * tl.cdiv(seq_len, STRETCH) * BLOCK_N * BLOCK_P
    for first in range(0, seq_len, STRETCH):
        since = tl.zeros([BLOCK_N if BY_STATE else BLOCK_P], tl.float32)
        for t in range(first, min(first + STRETCH, seq_len)):
            h += keys[:, None] * new[None, :]  # of the token before: so a stretch ends with what is left, which is kept
            if NORMALIZE:
                z += keys[:, None] * unit[None, :]
            c, b = _row(C + row * N, n, in_n, EVEN_N), _row(B + row * N, n, in_n, EVEN_N)
            v = _row(V + row * P, p, in_p, EVEN_P)
            step = _row(STEP + row * N, n, in_n, EVEN_N) if BY_STATE else _row(STEP + row * P, p, in_p, EVEN_P)
            slope = _row(SLOPE + row * P, p, in_p, EVEN_P)
            decay = tl.exp2(_exponents(exponent, step, RESETS, batch * seq_len + t, BY_STATE, HAS_RESETS))
            h *= decay
            part = slope[None, :] * h
            if NORMALIZE:
                z *= decay
                part += _row(SLOPE_Z + row * P, p, in_p, EVEN_P)[None, :] * z
            _put(GRAD_C + (layer_n + row) * N, n, tl.sum(part, 1), in_n, EVEN_N)
            part *= c[:, None]
            since += step
            if HAS_RESETS:
                since = tl.where(tl.load(RESETS + batch * seq_len + t) != 0, 0.0, since)
            grad_rate -= _along_step(since, BY_STATE) * part
            rated = _to_step(exponent * part, BY_STATE) * -_LN_2
            if BY_STATE:
                _put(RATED + (layer_n + row) * N, n, rated, in_n, EVEN_N)
                if tl.program_id(1) == 0:
                    _put(SINCE + row * N, n, since, in_n, EVEN_N)
            else:
                _put(RATED + (layer_p + row) * P, p, rated, in_p, EVEN_P)
                if tl.program_id(2) == 0:
                    _put(SINCE + row * P, p, since, in_p, EVEN_P)
            keys, new, unit = _taken_in(b, v, step, BY_STATE)
            row += heads
        tl.store(LEFT + left + local, h)
        if NORMALIZE:
            tl.store(LEFT_Z + left + local, z)
        left += BLOCK_N * BLOCK_P
    _put(GRAD_RATE + place * N * P, cell, grad_rate, inside, EVEN)


@triton.jit
def sweep_backwards(
    C, B, V, STEP, RATE, RESETS, SLOPE, SLOPE_Z, RATED, SINCE, LEFT, LEFT_Z, GRAD_H, GRAD_Z, GRAD_RATE, GRAD_STEP, GRAD_B, GRAD_V,
    seq_len, heads, rate_heads,
    N: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, STRETCH: tl.constexpr,
    BY_STATE: tl.constexpr, NORMALIZE: tl.constexpr, HAS_RESETS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The adjoint states from the last token to the first, and the rest of the gradients.

    RATED, SINCE, LEFT and LEFT_Z are those of the sweep forwards, GRAD_RATE is finished;  GRAD_H, GRAD_Z [b, h, n, p] are the gradients of
    the last states, which become those of the first;  GRAD_STEP is like RATED;  GRAD_B [j, b, t, h, n], GRAD_V [i, b, t, h, p].
    WIDE: a sequence has 2^31 features or more.
    """
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_P: tl.constexpr = P % BLOCK_P == 0
    EVEN: tl.constexpr = EVEN_N and EVEN_P
    WIDTH: tl.constexpr = N if BY_STATE else P
    place = tl.program_id(0).to(tl.int64)
    batch, head = place // heads, place % heads
    p, n = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P), tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_p, in_n, cell = p < P, n < N, n[:, None] * P + p[None, :]
    inside = in_n[:, None] & in_p[None, :]
    exponent = _row(RATE + head % rate_heads * N * P, cell, inside, EVEN) * -_LOG2_E
    adjoint = _row(GRAD_H + place * N * P, cell, inside, EVEN)
    adjoint_z = _row(GRAD_Z + place * N * P, cell, inside, EVEN) if NORMALIZE else adjoint
    grad_rate = _row(GRAD_RATE + place * N * P, cell, inside, EVEN)
    # Of the 255 registers of a thread none is free: places within a sequence are 32-bit numbers where these suffice, and what is left
    # lies tile by tile.
    sequence = batch * seq_len * heads
    rows = (tl.num_programs(0) // heads).to(tl.int64) * seq_len * heads
    layer_n, layer_p = tl.program_id(1) * rows + sequence, tl.program_id(2) * rows + sequence
    C, B, V, STEP, SINCE = C + sequence * N, B + sequence * N, V + sequence * P, STEP + sequence * WIDTH, SINCE + sequence * WIDTH
    SLOPE, GRAD_B, GRAD_V = SLOPE + sequence * P, GRAD_B + layer_n * N, GRAD_V + layer_p * P
    layer = layer_n * N if BY_STATE else layer_p * P
    RATED, GRAD_STEP = RATED + layer, GRAD_STEP + layer
    if NORMALIZE:
        SLOPE_Z += sequence * P
    if HAS_RESETS:
        RESETS += batch * seq_len
    row = (seq_len - 1) * heads + head
    row = row if WIDE else row.to(tl.int32)
    stretches = tl.cdiv(seq_len, STRETCH)
    local = tl.arange(0, BLOCK_N)[:, None] * BLOCK_P + tl.arange(0, BLOCK_P)[None, :]
    tile = (place * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    left = (tile * stretches + stretches - 1) * BLOCK_N * BLOCK_P
    for back in range(stretches):
        first = (stretches - 1 - back) * STRETCH
        length = min(STRETCH, seq_len - first)
        part = adjoint * tl.load(LEFT + left + local)
        if NORMALIZE:
            part += adjoint_z * tl.load(LEFT_Z + left + local)
        since = _row(SINCE + row * N, n, in_n, EVEN_N) if BY_STATE else _row(SINCE + row * P, p, in_p, EVEN_P)
        grad_rate -= _along_step(since, BY_STATE) * part
        running = _to_step(exponent * part, BY_STATE) * -_LN_2
        counted = 0.0  # what the last token takes in is not in what is left
        for ago in range(length):
            c, b = _row(C + row * N, n, in_n, EVEN_N), _row(B + row * N, n, in_n, EVEN_N)
            v = _row(V + row * P, p, in_p, EVEN_P)
            step = _row(STEP + row * N, n, in_n, EVEN_N) if BY_STATE else _row(STEP + row * P, p, in_p, EVEN_P)
            since = _row(SINCE + row * N, n, in_n, EVEN_N) if BY_STATE else _row(SINCE + row * P, p, in_p, EVEN_P)
            slope = _row(SLOPE + row * P, p, in_p, EVEN_P)
            keys, new, unit = _taken_in(b, v, step, BY_STATE)
            grad_new = tl.sum(keys[:, None] * adjoint, 0)
            part = adjoint * new[None, :]
            if NORMALIZE:
                part += adjoint_z * unit[None, :]
            grad_keys = tl.sum(part, 1)
            part *= keys[:, None]
            grad_rate += _along_step(since * counted, BY_STATE) * part
            change = _to_step(exponent * part, BY_STATE) * (_LN_2 * counted)
            t = first + length - 1 - ago
            if BY_STATE:
                running += change + _row(RATED + row * N, n, in_n, EVEN_N)
                if HAS_RESETS:
                    running = tl.where(tl.load(RESETS + t) != 0, 0.0, running)
                _put(GRAD_STEP + row * N, n, b * grad_keys - running, in_n, EVEN_N)
                _put(GRAD_B + row * N, n, step * grad_keys, in_n, EVEN_N)
                _put(GRAD_V + row * P, p, grad_new, in_p, EVEN_P)
            else:
                running += change + _row(RATED + row * P, p, in_p, EVEN_P)
                if HAS_RESETS:
                    running = tl.where(tl.load(RESETS + t) != 0, 0.0, running)
                grad_step = v * grad_new - running
                if NORMALIZE:
                    grad_step += tl.sum(keys[:, None] * adjoint_z, 0)
                _put(GRAD_STEP + row * P, p, grad_step, in_p, EVEN_P)
                _put(GRAD_B + row * N, n, grad_keys, in_n, EVEN_N)
                _put(GRAD_V + row * P, p, step * grad_new, in_p, EVEN_P)
            decay = tl.exp2(_exponents(exponent, step, RESETS, t, BY_STATE, HAS_RESETS))
            adjoint = decay * (adjoint + c[:, None] * slope[None, :])
            if NORMALIZE:
                adjoint_z = decay * (adjoint_z + c[:, None] * _row(SLOPE_Z + row * P, p, in_p, EVEN_P)[None, :])
            counted = 1.0
            row -= heads
        left -= BLOCK_N * BLOCK_P
    place = batch * heads + row + heads  # as it was; but kept from the start, with all that the compiler makes of it, it would be spilled
    _put(GRAD_H + place * N * P, cell, adjoint, inside, EVEN)
    _put(GRAD_RATE + place * N * P, cell, grad_rate, inside, EVEN)
    if NORMALIZE:
        _put(GRAD_Z + place * N * P, cell, adjoint_z, inside, EVEN)
