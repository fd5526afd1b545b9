"""Triton kernels of the scan by chunks of tokens, for decays that the channels of V share; launched by triton_chunks.py.

The algebra is that of chunks.py.  A token has a logarithm to base 2 of its decay, a <= 0, one by head or one for each n, or none (DECAYS);
by head it may have a weight (WEIGHTED), the step that multiplies what it adds, which else is in B.  With L_i the sum of a over the chunk's
tokens up to i, a chunk that starts from S gives

    out_i = sum_{j <= i} weight_j (2^(L_i - L_j) C_i . B_j) V_j  +  (2^L_i C_i) S
    S'    = 2^L_T S  +  sum_j weight_j (2^(L_T - L_j) B_j) outer V_j.

One kernel walks along the chunks and keeps the state before each (backwards: the adjoint after each), others work on all chunks at once.
Strong decays must cost weak ones no digits, so the decay between two tokens is never the difference of two fp32 numbers.  By head it comes
from sums in fp64, each kept as two fp32 numbers, and its gradient sums the weights of all pairs that a token parts.  By state the chunks
are short, and for each distance between tokens one more decay is added to the sum; the gradient is that of loop.py, whose differences
reach over twice as many tokens there.

Matrix products take operands of the type DOT, in which states are stored, too, and add up in fp32; what is carried is fp32.
"""

# b batch, t seq_len, h heads, n state_size, p columns of V, c chunks, T tokens of a chunk, i tiles along n

import triton
import triton.language as tl

_LN_2 = tl.constexpr(0.6931471805599453)
NO_DECAY, BY_HEAD, BY_STATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Values of DECAYS."""


@triton.jit
def _placed(seq_len, heads, T: tl.constexpr):
    """Of a program that works on a chunk: batch, head, chunk, and the chunk's number among those of all heads.

    The grid is (b c h, tiles), as only its first number may exceed 65535.  Heads lie side by side in memory, and so do their programs.
    """
    program, chunks = tl.program_id(0), tl.cdiv(seq_len, T)
    batch, head, chunk = (program // heads // chunks).to(tl.int64), program % heads, program // heads % chunks
    return batch, head, chunk, (batch * heads + head) * chunks + chunk


@triton.jit
def _dot(a, b, sums, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """sums + a @ b."""
    return tl.dot(a.to(DOT), b.to(DOT), sums, input_precision=PRECISION)


@triton.jit
def _scalars(pointer, rows, inside):
    """A number of each token of a chunk, 0 behind the sequence's end."""
    return tl.load(pointer + rows, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _inverses(DIVISOR, rows, inside):
    """1 / divisor of each token of a chunk, 1 behind the sequence's end."""
    return 1.0 / tl.load(DIVISOR + rows, mask=inside, other=1.0)


@triton.jit
def _sums(LOG_DECAY, rows, inside, DECAYS: tl.constexpr):
    """Of a decay by head: L_i as two numbers [T], 2^(L_T - L_i), 2^L_i [T], and 2^L_T; ones without a decay."""
    if DECAYS == BY_HEAD:
        sums = tl.cumsum(_scalars(LOG_DECAY, rows, inside).to(tl.float64), 0)
        last = tl.min(sums, 0)
        high = sums.to(tl.float32)
        low = (sums - high.to(tl.float64)).to(tl.float32)
        return high, low, tl.exp2((last - sums).to(tl.float32)), tl.exp2(high), tl.exp2(last.to(tl.float32))
    else:
        ones = tl.full(rows.shape, 1.0, tl.float32)
        return ones, ones, ones, ones, tl.max(ones, 0)


@triton.jit
def _sums_by_state(LOG_DECAY, places, inside, axis: tl.constexpr):
    """2^(L_T - L_i), 2^L_i and 2^L_T [n], of a tile whose `axis` is that of the tokens."""
    sums = tl.cumsum(tl.load(LOG_DECAY + places, mask=inside, other=0.0).to(tl.float64), axis)
    last = tl.min(sums, axis)
    after = tl.exp2((tl.expand_dims(last, axis) - sums).to(tl.float32))
    return after, tl.exp2(sums.to(tl.float32)), tl.exp2(last.to(tl.float32))


@triton.jit
def _documents(RESETS, places, inside, HAS_RESETS: tl.constexpr):
    """Number of documents that have begun up to each token [T], and in all."""
    if HAS_RESETS:
        numbers = tl.cumsum((tl.load(RESETS + places, mask=inside, other=0) != 0).to(tl.int32), 0)
    else:
        numbers = tl.zeros(places.shape, tl.int32)
    return numbers, tl.max(numbers, 0)


@triton.jit
def _pair_decays(high, low, numbers, DECAYS: tl.constexpr, HAS_RESETS: tl.constexpr):
    """2^(L_i - L_j) [T, T] where token i sees token j, else 0."""
    order = tl.arange(0, high.shape[0])
    sees = order[:, None] >= order[None, :]
    if HAS_RESETS:
        sees = sees & (numbers[:, None] == numbers[None, :])
    if DECAYS == BY_HEAD:
        exponents = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        return tl.exp2(tl.where(sees, exponents, float("-inf")))
    else:
        return tl.where(sees, 1.0, 0.0)


@triton.jit
def _load_pairs(PAIRS, rows, inside, T: tl.constexpr):
    """The weights of the pairs of a chunk [T, T]."""
    return tl.load(PAIRS + rows[:, None] * T + tl.arange(0, T)[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def walk(
    KEYS, VALUES, LOG_DECAY, WEIGHT, RESETS, DIVISOR, SLOPE_Z, S0, Z0, STATES, STATES_Z, S, Z, seq_len, heads,
    N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, DECAYS: tl.constexpr, WEIGHTED: tl.constexpr, NORMALIZE: tl.constexpr,
    HAS_RESETS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The state before each chunk, STATES [b, h, c, n, p] and STATES_Z [b, h, c, n], and after the last, S [b, h, n, p] and Z [b, h, n].

    KEYS is B, VALUES is V, S0 and Z0 the state before the first token;  LOG_DECAY, WEIGHT, DIVISOR, SLOPE_Z [b, t, h].
    REVERSE: the adjoint of the state after each chunk, and before the first.  KEYS is C, VALUES and SLOPE_Z the gradients of outputs and
    denominator, DIVISOR what the outputs have been divided by, S0 and Z0 the gradients of the last state.
    The grid is (b h, tiles along p, tiles along n).
    """
    place = tl.program_id(0).to(tl.int64)
    batch, head = place // heads, place % heads
    p, n = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P), tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_p, in_n = p < P, n < N
    cell, inside = n[:, None] * P + p[None, :], in_n[:, None] & in_p[None, :]
    state = tl.load(S0 + place * N * P + cell, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(Z0 + place * N + n, mask=in_n, other=0.0).to(tl.float32) if NORMALIZE else tl.zeros([BLOCK_N], tl.float32)
    chunks = tl.cdiv(seq_len, T)
    for number in range(chunks):
        chunk = chunks - 1 - number if REVERSE else number
        tl.store(STATES + (place * chunks + chunk) * N * P + cell, state.to(STATES.dtype.element_ty), mask=inside)
        if NORMALIZE and tl.program_id(1) == 0:
            tl.store(STATES_Z + (place * chunks + chunk) * N + n, total, mask=in_n)
        t = chunk * T + tl.arange(0, T)
        in_t = t < seq_len
        rows = (batch * seq_len + t) * heads + head
        in_key, places = in_t[None, :] & in_n[:, None], rows[None, :] * N + n[:, None]
        keys = tl.load(KEYS + places, mask=in_key, other=0.0).to(tl.float32)
        if DECAYS == BY_STATE:
            after, before, kept = _sums_by_state(LOG_DECAY, places, in_key, 1)
            keys *= before if REVERSE else after
        else:
            _high, _low, after, before, whole = _sums(LOG_DECAY, rows, in_t, DECAYS)
            keys *= (before if REVERSE else after)[None, :]
            kept = tl.full([BLOCK_N], 1.0, tl.float32) * whole
        numbers, last = _documents(RESETS, batch * seq_len + t, in_t, HAS_RESETS)
        if HAS_RESETS:
            keys = tl.where((numbers == (0 if REVERSE else last))[None, :], keys, 0.0)
            kept = tl.where(last == 0, kept, 0.0)
        if WEIGHTED and not REVERSE:
            keys *= _scalars(WEIGHT, rows, in_t)[None, :]
        if NORMALIZE:
            if REVERSE:
                total = total * kept + tl.sum(keys * _scalars(SLOPE_Z, rows, in_t)[None, :], 1)
                keys *= _inverses(DIVISOR, rows, in_t)[None, :]
            else:
                total = total * kept + tl.sum(keys.to(DOT).to(tl.float32), 1)
        values = tl.load(VALUES + rows[:, None] * P + p[None, :], mask=in_t[:, None] & in_p[None, :], other=0.0)
        state = _dot(keys, values, state * kept[:, None], DOT, PRECISION)
    tl.store(S + place * N * P + cell, state, mask=inside)
    if NORMALIZE and tl.program_id(1) == 0:
        tl.store(Z + place * N + n, total, mask=in_n)


@triton.jit
def outputs(
    C, B, V, LOG_DECAY, WEIGHT, RESETS, PAIRS, STATES, STATES_Z, Y, DENOMINATOR, eps, seq_len, heads,
    N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, DECAYS: tl.constexpr, WEIGHTED: tl.constexpr, NORMALIZE: tl.constexpr,
    HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """C_t h_t, divided by C_t z_t where there is one, Y [b, t, h, p], and C_t z_t itself, DENOMINATOR [b, t, h].

    A denominator below eps in magnitude counts as eps of its sign.  PAIRS is that of pairs_by_state, for decays by state.
    The tiles of the grid are those along p.
    """
    batch, head, chunk, start = _placed(seq_len, heads, T)
    p, t = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P), chunk * T + tl.arange(0, T)
    in_p, in_t = p < P, t < seq_len
    rows = (batch * seq_len + t) * heads + head
    weights, numerator = tl.zeros([T, T], tl.float32), tl.zeros([T, BLOCK_P], tl.float32)
    denominator = tl.zeros([T], tl.float32)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        in_n = n < N
        in_feature, places = in_t[:, None] & in_n[None, :], rows[:, None] * N + n[None, :]
        c = tl.load(C + places, mask=in_feature, other=0.0)
        if DECAYS == BY_STATE:
            _after, before, _whole = _sums_by_state(LOG_DECAY, places, in_feature, 0)
            c = c.to(tl.float32) * before
        else:
            b = tl.load(B + places, mask=in_feature, other=0.0)
            weights = _dot(c, tl.trans(b), weights, DOT, PRECISION)
        state = tl.load(STATES + start * N * P + n[:, None] * P + p[None, :], mask=in_n[:, None] & in_p[None, :], other=0.0)
        numerator = _dot(c, state, numerator, DOT, PRECISION)
        if NORMALIZE:
            total = tl.load(STATES_Z + start * N + n, mask=in_n, other=0.0)
            denominator += tl.sum(c.to(DOT).to(tl.float32) * total[None, :], 1)
    numbers, _last = _documents(RESETS, batch * seq_len + t, in_t, HAS_RESETS)
    if DECAYS == BY_STATE:
        weights, before = _load_pairs(PAIRS, rows, in_t, T), tl.full([T], 1.0, tl.float32)
    else:
        high, low, _after, before, _whole = _sums(LOG_DECAY, rows, in_t, DECAYS)
        weights *= _pair_decays(high, low, numbers, DECAYS, HAS_RESETS)
    if HAS_RESETS:
        before = tl.where(numbers == 0, before, 0.0)
    if WEIGHTED:
        weights *= _scalars(WEIGHT, rows, in_t)[None, :]
    weights = weights.to(DOT)  # the same for the denominator: what it rounds off must be in both
    v = tl.load(V + rows[:, None] * P + p[None, :], mask=in_t[:, None] & in_p[None, :], other=0.0)
    numerator = _dot(weights, v, numerator * before[:, None], DOT, PRECISION)
    if NORMALIZE:
        denominator = denominator * before + tl.sum(weights.to(tl.float32), 1)
        if tl.program_id(1) == 0:
            tl.store(DENOMINATOR + rows, denominator, mask=in_t)
        floor = tl.where(denominator < 0, -eps, eps)
        numerator /= tl.where(tl.abs(denominator) < eps, floor, denominator)[:, None]
    tl.store(Y + rows[:, None] * P + p[None, :], numerator.to(Y.dtype.element_ty), mask=in_t[:, None] & in_p[None, :])


@triton.jit
def gradients_of_features(
    C, B, V, LOG_DECAY, WEIGHT, RESETS, STATES, STATES_Z, DIVISOR, SLOPE, SLOPE_Z, ADJOINTS, ADJOINTS_Z,
    GRAD_C, GRAD_B, GRAD_LOG, GRAD_LOG_NEXT, GRAD_WEIGHT, seq_len, heads,
    N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, DECAYS: tl.constexpr, WEIGHTED: tl.constexpr, NORMALIZE: tl.constexpr,
    HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """GRAD_C, GRAD_B [b, t, h, n], and a tile's shares in those of weight and decay, GRAD_WEIGHT, GRAD_LOG, GRAD_LOG_NEXT [i, b, t, h].

    GRAD_LOG_NEXT belongs to the next token of the same chunk.  The tiles of the grid are those along n.
    """
    batch, head, chunk, start = _placed(seq_len, heads, T)
    n, t = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), chunk * T + tl.arange(0, T)
    in_n, in_t = n < N, t < seq_len
    rows = (batch * seq_len + t) * heads + head
    slopes, grad_c = tl.zeros([T, T], tl.float32), tl.zeros([T, BLOCK_N], tl.float32)
    grad_b, through = tl.zeros([T, BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, P, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        in_p = p < P
        in_row, in_cell = in_t[:, None] & in_p[None, :], in_n[:, None] & in_p[None, :]
        slope = tl.load(SLOPE + rows[:, None] * P + p[None, :], mask=in_row, other=0.0).to(DOT)
        v = tl.load(V + rows[:, None] * P + p[None, :], mask=in_row, other=0.0).to(DOT)
        state = tl.load(STATES + start * N * P + n[:, None] * P + p[None, :], mask=in_cell, other=0.0)
        adjoint = tl.load(ADJOINTS + start * N * P + n[:, None] * P + p[None, :], mask=in_cell, other=0.0)
        slopes = _dot(slope, tl.trans(v), slopes, DOT, PRECISION)
        grad_c = _dot(slope, tl.trans(state), grad_c, DOT, PRECISION)
        grad_b = _dot(v, tl.trans(adjoint), grad_b, DOT, PRECISION)
        if DECAYS == BY_HEAD:
            through += tl.sum(state.to(tl.float32) * adjoint.to(tl.float32), 1)
    if NORMALIZE:
        slope_z, inverse = _scalars(SLOPE_Z, rows, in_t), _inverses(DIVISOR, rows, in_t)
        total = tl.load(STATES_Z + start * N + n, mask=in_n, other=0.0)
        adjoint_z = tl.load(ADJOINTS_Z + start * N + n, mask=in_n, other=0.0)
        slopes = slopes * inverse[:, None] + slope_z[:, None]
        grad_c = grad_c * inverse[:, None] + slope_z[:, None] * total[None, :]
        grad_b += adjoint_z[None, :]
        through += total * adjoint_z
    high, low, after, before, whole = _sums(LOG_DECAY, rows, in_t, DECAYS)
    numbers, last = _documents(RESETS, batch * seq_len + t, in_t, HAS_RESETS)
    if HAS_RESETS:
        before, after = tl.where(numbers == 0, before, 0.0), tl.where(numbers == last, after, 0.0)
        whole = tl.where(last == 0, whole, 0.0)
    grad_c *= before[:, None]
    grad_b *= after[:, None]
    slopes *= _pair_decays(high, low, numbers, DECAYS, HAS_RESETS)
    in_feature = in_t[:, None] & in_n[None, :]
    c = tl.load(C + rows[:, None] * N + n[None, :], mask=in_feature, other=0.0).to(tl.float32)
    b = tl.load(B + rows[:, None] * N + n[None, :], mask=in_feature, other=0.0).to(tl.float32)
    if DECAYS == BY_HEAD or WEIGHTED:
        share = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // tl.cdiv(seq_len, T)) * seq_len + rows
        pairs = slopes * _dot(c, tl.trans(b), tl.zeros([T, T], tl.float32), DOT, PRECISION)
        leaving = tl.sum(b * grad_b, 1)
        if WEIGHTED:
            weight = _scalars(WEIGHT, rows, in_t)
            tl.store(GRAD_WEIGHT + share, tl.sum(pairs, 0) + leaving, mask=in_t)
            pairs *= weight[None, :]
            leaving *= weight
        if DECAYS == BY_HEAD:
            order = tl.arange(0, T)
            pairs = tl.where(order[:, None] > order[None, :], tl.cumsum(pairs, 1), 0.0)
            tl.store(GRAD_LOG_NEXT + share, (tl.sum(pairs, 0) + tl.cumsum(leaving, 0)) * _LN_2, mask=in_t)
            entering = tl.cumsum(tl.sum(c * grad_c, 1), 0, reverse=True) + tl.sum(through, 0) * whole
            tl.store(GRAD_LOG + share, entering * _LN_2, mask=in_t)
    if WEIGHTED:
        weight = _scalars(WEIGHT, rows, in_t)
        grad_c = _dot(slopes * weight[None, :], b, grad_c, DOT, PRECISION)
        grad_b = _dot(tl.trans(slopes), c, grad_b, DOT, PRECISION) * weight[:, None]
    else:
        grad_c = _dot(slopes, b, grad_c, DOT, PRECISION)
        grad_b = _dot(tl.trans(slopes), c, grad_b, DOT, PRECISION)
    tl.store(GRAD_C + rows[:, None] * N + n[None, :], grad_c, mask=in_feature)
    tl.store(GRAD_B + rows[:, None] * N + n[None, :], grad_b, mask=in_feature)


@triton.jit
def gradients_of_values(
    C, B, LOG_DECAY, WEIGHT, RESETS, PAIRS, DIVISOR, SLOPE, ADJOINTS, GRAD_V, seq_len, heads,
    N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, DECAYS: tl.constexpr, WEIGHTED: tl.constexpr, NORMALIZE: tl.constexpr,
    HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """GRAD_V [b, t, h, p].  The tiles of the grid are those along p."""
    batch, head, chunk, start = _placed(seq_len, heads, T)
    p, t = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P), chunk * T + tl.arange(0, T)
    in_p, in_t = p < P, t < seq_len
    rows = (batch * seq_len + t) * heads + head
    weights, grad_v = tl.zeros([T, T], tl.float32), tl.zeros([T, BLOCK_P], tl.float32)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        in_n = n < N
        in_feature, places = in_t[:, None] & in_n[None, :], rows[:, None] * N + n[None, :]
        b = tl.load(B + places, mask=in_feature, other=0.0)
        if DECAYS == BY_STATE:
            after, _before, _whole = _sums_by_state(LOG_DECAY, places, in_feature, 0)
            b = b.to(tl.float32) * after
        else:
            c = tl.load(C + places, mask=in_feature, other=0.0)
            weights = _dot(c, tl.trans(b), weights, DOT, PRECISION)
        adjoint = tl.load(ADJOINTS + start * N * P + n[:, None] * P + p[None, :], mask=in_n[:, None] & in_p[None, :], other=0.0)
        grad_v = _dot(b, adjoint, grad_v, DOT, PRECISION)
    numbers, last = _documents(RESETS, batch * seq_len + t, in_t, HAS_RESETS)
    if DECAYS == BY_STATE:
        weights, after = _load_pairs(PAIRS, rows, in_t, T), tl.full([T], 1.0, tl.float32)
    else:
        high, low, after, _before, _whole = _sums(LOG_DECAY, rows, in_t, DECAYS)
        weights *= _pair_decays(high, low, numbers, DECAYS, HAS_RESETS)
    if HAS_RESETS:
        after = tl.where(numbers == last, after, 0.0)
    if NORMALIZE:
        weights *= _inverses(DIVISOR, rows, in_t)[:, None]
    in_row = in_t[:, None] & in_p[None, :]
    slope = tl.load(SLOPE + rows[:, None] * P + p[None, :], mask=in_row, other=0.0)
    grad_v = _dot(tl.trans(weights), slope, grad_v * after[:, None], DOT, PRECISION)
    if WEIGHTED:
        grad_v *= _scalars(WEIGHT, rows, in_t)[:, None]
    tl.store(GRAD_V + rows[:, None] * P + p[None, :], grad_v, mask=in_row)


@triton.jit
def pairs_by_state(
    C, B, LOG_DECAY, RESETS, PAIRS, seq_len, heads,
    N: tl.constexpr, T: tl.constexpr, BLOCK_N: tl.constexpr, HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """Weights of the pairs of tokens of a chunk, PAIRS [b, t, h, T]: of each token those of the chunk's tokens.  See _placed."""
    batch, head, chunk, _start = _placed(seq_len, heads, T)
    order = tl.arange(0, T)
    t = chunk * T + order
    in_t = t < seq_len
    rows = (batch * seq_len + t) * heads + head
    weights = tl.zeros([T, T], tl.float32)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        in_feature, places = in_t[:, None] & (n < N)[None, :], rows[:, None] * N + n[None, :]
        c = tl.load(C + places, mask=in_feature, other=0.0).to(tl.float32)
        between = tl.zeros([T, BLOCK_N], tl.float32)
        for distance in range(T):
            earlier, there = places - distance * heads * N, in_feature & (order >= distance)[:, None]
            b = tl.load(B + earlier, mask=there, other=0.0).to(tl.float32)
            weight = tl.sum(c * b * tl.exp2(between), 1)
            weights += tl.where(order[:, None] - distance == order[None, :], weight[:, None], 0.0)
            between += tl.load(LOG_DECAY + earlier, mask=there, other=0.0)
    if HAS_RESETS:
        numbers, _last = _documents(RESETS, batch * seq_len + t, in_t, HAS_RESETS)
        weights = tl.where(numbers[:, None] == numbers[None, :], weights, 0.0)
    tl.store(PAIRS + rows[:, None] * T + order[None, :], weights, mask=in_t[:, None])


@triton.jit
def gradients_of_features_by_state(
    C, B, V, LOG_DECAY, RESETS, STATES, STATES_Z, DIVISOR, SLOPE, SLOPE_Z, ADJOINTS, ADJOINTS_Z, GRAD_C, GRAD_B, GRAD_LOG, seq_len, heads,
    N: tl.constexpr, P: tl.constexpr, T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, NORMALIZE: tl.constexpr, HAS_RESETS: tl.constexpr,
):  # fmt: skip
    """GRAD_C, GRAD_B and GRAD_LOG [b, t, h, n].  The tiles of the grid are those along n."""
    batch, head, chunk, start = _placed(seq_len, heads, T)
    n, order = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, T)
    t = chunk * T + order
    in_n, in_t = n < N, t < seq_len
    rows = (batch * seq_len + t) * heads + head
    slopes, grad_c = tl.zeros([T, T], tl.float32), tl.zeros([T, BLOCK_N], tl.float32)
    grad_b, through = tl.zeros([T, BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, P, BLOCK_P):
        p = first + tl.arange(0, BLOCK_P)
        in_p = p < P
        in_row, in_cell = in_t[:, None] & in_p[None, :], in_n[:, None] & in_p[None, :]
        slope = tl.load(SLOPE + rows[:, None] * P + p[None, :], mask=in_row, other=0.0)
        v = tl.load(V + rows[:, None] * P + p[None, :], mask=in_row, other=0.0)
        state = tl.load(STATES + start * N * P + n[:, None] * P + p[None, :], mask=in_cell, other=0.0)
        adjoint = tl.load(ADJOINTS + start * N * P + n[:, None] * P + p[None, :], mask=in_cell, other=0.0)
        slopes = _dot(slope, tl.trans(v), slopes, DOT, PRECISION)
        grad_c = _dot(slope, tl.trans(state), grad_c, DOT, PRECISION)
        grad_b = _dot(v, tl.trans(adjoint), grad_b, DOT, PRECISION)
        through += tl.sum(state.to(tl.float32) * adjoint.to(tl.float32), 1)
    if NORMALIZE:
        slope_z, inverse = _scalars(SLOPE_Z, rows, in_t), _inverses(DIVISOR, rows, in_t)
        total = tl.load(STATES_Z + start * N + n, mask=in_n, other=0.0)
        adjoint_z = tl.load(ADJOINTS_Z + start * N + n, mask=in_n, other=0.0)
        slopes = slopes * inverse[:, None] + slope_z[:, None]
        grad_c = grad_c * inverse[:, None] + slope_z[:, None] * total[None, :]
        grad_b += adjoint_z[None, :]
        through += total * adjoint_z
    in_feature, places = in_t[:, None] & in_n[None, :], rows[:, None] * N + n[None, :]
    after, before, whole = _sums_by_state(LOG_DECAY, places, in_feature, 0)
    numbers, last = _documents(RESETS, batch * seq_len + t, in_t, HAS_RESETS)
    if HAS_RESETS:
        slopes = tl.where(numbers[:, None] == numbers[None, :], slopes, 0.0)
        before, after = tl.where((numbers == 0)[:, None], before, 0.0), tl.where((numbers == last)[:, None], after, 0.0)
        whole = tl.where(last == 0, whole, 0.0)
    grad_c *= before
    grad_b *= after
    c = tl.load(C + places, mask=in_feature, other=0.0).to(tl.float32)
    b = tl.load(B + places, mask=in_feature, other=0.0).to(tl.float32)
    leaving = tl.cumsum(b * grad_b, 0) - b * grad_b
    grad_log = tl.cumsum(c * grad_c, 0, reverse=True) + leaving + (through * whole)[None, :]
    # pairs of different tokens: of each token with those before it, and with those after it
    of_c, of_b = tl.zeros([T, BLOCK_N], tl.float32), tl.zeros([T, BLOCK_N], tl.float32)
    back = tl.load(LOG_DECAY + places, mask=in_feature, other=0.0)
    ahead = tl.zeros([T, BLOCK_N], tl.float32)
    for distance in range(1, T):
        step = distance * heads * N
        there = in_feature & (order >= distance)[:, None]
        slope = tl.sum(tl.where(order[:, None] - distance == order[None, :], slopes, 0.0), 1)
        earlier = tl.load(B + places - step, mask=there, other=0.0).to(tl.float32)
        of_c += slope[:, None] * earlier * tl.exp2(back)
        back += tl.load(LOG_DECAY + places - step, mask=there, other=0.0)
        there = in_n[None, :] & ((order + distance < T) & (t + distance < seq_len))[:, None]
        slope = tl.sum(tl.where(order[:, None] - distance == order[None, :], slopes, 0.0), 0)
        ahead += tl.load(LOG_DECAY + places + step, mask=there, other=0.0)
        later = tl.load(C + places + step, mask=there, other=0.0).to(tl.float32)
        of_b += slope[:, None] * later * tl.exp2(ahead)
    grad_log += tl.cumsum(c * of_c - b * of_b, 0, reverse=True)
    own = tl.sum(tl.where(order[:, None] == order[None, :], slopes, 0.0), 1)[:, None]
    tl.store(GRAD_C + places, grad_c + of_c + own * b, mask=in_feature)
    tl.store(GRAD_B + places, grad_b + of_b + own * c, mask=in_feature)
    tl.store(GRAD_LOG + places, grad_log * _LN_2, mask=in_feature)
