"""The sweeps of a scan whose decay differs between the channels of V, compiled by numba; imported by numba_backend.py alone.

The mathematics is that of loop.py.  Here one channel of one head is a lane: its states, h of the numerator and z of the denominator, are
two rows of n numbers that stay in the cache while the lane walks along the sequence, and the loops over n become vector instructions.
"""

# b batch, t seq_len, h num_local_heads, n state_size, p head_dim, s number of stretches

import math
from typing import NamedTuple

import numba
import numpy as np
from numba import types
from numba.extending import overload

_LANES = 16
"""Of a head that are worked on by one thread; a head's gradients are added up by one."""
_WALK = 128
"""Tokens that a lane walks along before the next lane does: their C and B stay in the cache, and each walk costs a few copies."""

# Sums over n may be taken in any order, which vector instructions need; NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}
_inner = numba.njit(cache=True, fastmath=_FAST, error_model="numpy")
_over_lanes = numba.njit(cache=True, parallel=True, fastmath=_FAST, error_model="numpy")


class Inputs(NamedTuple):
    """Of a scan, all contiguous and of one dtype."""

    C: np.ndarray
    """[b, h, t, n]"""
    B: np.ndarray
    """[b, h, t, n]"""
    x: np.ndarray
    """What the numerator takes in, [b, h, t, p]."""
    u: np.ndarray
    """What the denominator takes in, [b, h, t, p]."""
    step: np.ndarray
    """[b, h, t, n] by state, or [b, h, t, p, 1] by channel."""
    rate: np.ndarray
    """[h, p, n]"""
    resets: np.ndarray
    """[b, t] bool: nothing is kept of the tokens before."""


class Slopes(NamedTuple):
    """Gradients of what the forward pass has returned."""

    numerator: np.ndarray
    """[b, h, t, p]"""
    denominator: np.ndarray
    """[b, h, t, p]"""
    h: np.ndarray
    """Of the last state, [b, h, p, n]; the sweep backwards leaves the gradient of the initial state in it."""
    z: np.ndarray
    """The same of the denominator."""


class Gradients(NamedTuple):
    """What the two sweeps fill; all but x and u are zero before."""

    C: np.ndarray
    """But for what a token gives to itself, [b, h, t, n]; so are B, x and u."""
    B: np.ndarray
    x: np.ndarray
    u: np.ndarray
    rate: np.ndarray
    """[b, h, p, n]"""
    rated: np.ndarray
    """What each token adds to the running sum rate * q of loop.py, like step."""
    ends: np.ndarray
    """That sum after each stretch, [b, h, s, n] or [b, h, s, p, 1]."""


_LOG2_E = 1 / math.log(2)
_P1, _P2, _P3, _P4, _P5, _P6, _P7 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(1, 8))


@_inner
def _exp2_in_fp32(x):
    """2^f 2^k with k whole and |f| <= 1/2, 2^f from its series up to f^7 (error 3e-9): unlike a call of exp2 it can be vectorised.

    Below 2^-126 it gives 2^-126, and for NaN it gives NaN.
    """
    x = np.float32(-126) if x < np.float32(-126) else x
    k = np.rint(x)
    f = x - k
    p = _P1 + f * (_P2 + f * (_P3 + f * (_P4 + f * (_P5 + f * (_P6 + f * _P7)))))
    return (np.float32(1) + f * p) * np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)


def _exp2(x):
    """2^x for x <= 0."""
    return 2.0**x


@overload(_exp2)
def _choose_exp2(x):
    if x == types.float32:
        return lambda x: _exp2_in_fp32(x)
    return lambda x: math.exp(x * math.log(2))


# What a step varies over is known to the compiler by its array's number of dimensions; so each kind gets sweeps of its own: by channel a
# lane has one step a token, a number; by state it has a row of them.


def _of_lane(step, b, h, t, p):
    """The step of a lane at a token."""


@overload(_of_lane)
def _choose_of_lane(step, b, h, t, p):
    if step.ndim == 5:
        return lambda step, b, h, t, p: step[b, h, t, p, 0]
    return lambda step, b, h, t, p: step[b, h, t]


def _numbers(step):
    """An array like a step as [b, h, t, n | p]."""


@overload(_numbers)
def _choose_numbers(step):
    if step.ndim == 5:
        return lambda step: step[:, :, :, :, 0]
    return lambda step: step


def _at(step, n):
    """The step of one state of a lane."""


@overload(_at)
def _choose_at(step, n):
    if isinstance(step, types.Array):
        return lambda step, n: step[n]
    return lambda step, n: step


def _gather(sums, n, value):
    """`sums` with the value of state n put into its row, or added where it is a number."""


@overload(_gather)
def _choose_gather(sums, n, value):
    if isinstance(sums, types.Array):

        def put(sums, n, value):
            sums[n] = value
            return sums

        return put
    return lambda sums, n, value: sums + value


def _nothing(row, step):
    """What `_gather` starts from, for steps of that kind: `row`, or 0."""


@overload(_nothing)
def _choose_nothing(row, step):
    if isinstance(step, types.Array):
        return lambda row, step: row
    return lambda row, step: row.dtype.type(0)


def _add_to_lane(array, b, h, t, p, sums):
    """array += what was gathered; the array is like a step."""


@overload(_add_to_lane)
def _choose_add_to_lane(array, b, h, t, p, sums):
    if isinstance(sums, types.Array):

        def add_row(array, b, h, t, p, sums):
            row = array[b, h, t]
            for n in range(len(sums)):
                row[n] += sums[n]

        return add_row

    def add_number(array, b, h, t, p, sums):
        array[b, h, t, p, 0] += sums

    return add_number


# The vectoriser gives up on a loop that writes to several arrays which may overlap.  Arrays made in the same function cannot, so each sweep
# works on rows of its own, made by np.zeros, and copies in and out.


@_inner
def _exponents(rate):
    """Factor of a step in the exponent of 2."""
    return rate * rate.dtype.type(-_LOG2_E)


@_inner
def _scan_lane(inputs, b, h, p, walk, states, totals, numerator, denominator):
    C, B, x, u = inputs.C, inputs.B, inputs.x, inputs.u
    exponent = _exponents(inputs.rate[h, p])
    state, total = np.zeros(C.shape[3], C.dtype), np.zeros(C.shape[3], C.dtype)
    state[:], total[:] = states[b, h, p], totals[b, h, p]
    for t in range(*walk):
        if inputs.resets[b, t]:
            state[:], total[:] = 0, 0
        step = _of_lane(inputs.step, b, h, t, p)
        queries, keys, new, unit = C[b, h, t], B[b, h, t], x[b, h, t, p], u[b, h, t, p]
        read, read_total = C.dtype.type(0), C.dtype.type(0)
        for n in range(len(state)):
            decay = _exp2(exponent[n] * _at(step, n))
            kept, kept_total = decay * state[n], decay * total[n]
            read += queries[n] * kept
            read_total += queries[n] * kept_total
            state[n] = kept + keys[n] * new
            total[n] = kept_total + keys[n] * unit
        numerator[b, h, t, p], denominator[b, h, t, p] = read, read_total
    states[b, h, p], totals[b, h, p] = state, total


@_inner
def _walk(number, seq_len):
    """First token of a walk, and the one after its last."""
    return number * _WALK, min((number + 1) * _WALK, seq_len)


@_inner
def _ends_stretch(t, interval, seq_len):
    """Whether the token is the last of a stretch."""
    return (t + 1) % interval == 0 or t + 1 == seq_len


@_over_lanes
def forward(inputs, state, total, numerator, denominator):
    """Fill numerator and denominator [b, h, t, p] with what each token reads of those before it; the states [b, h, p, n] move on."""
    num_sequences, num_heads, head_dim, _ = state.shape
    seq_len = inputs.C.shape[2]
    num_blocks = -(-head_dim // _LANES)
    for block in numba.prange(num_sequences * num_heads * num_blocks):
        b, h = block // (num_heads * num_blocks), block // num_blocks % num_heads
        first = block % num_blocks * _LANES
        for number in range(-(-seq_len // _WALK)):
            for p in range(first, min(first + _LANES, head_dim)):
                _scan_lane(inputs, b, h, p, _walk(number, seq_len), state, total, numerator, denominator)


@_inner
def _sum_steps(step, resets, b, h, interval, elapsed):
    """elapsed = sum of steps since the token's stretch or its document began; both [b, h, t, n | p]."""
    for t in range(step.shape[2]):
        for m in range(step.shape[3]):
            before = 0 if t % interval == 0 else elapsed[b, h, t - 1, m]
            elapsed[b, h, t, m] = 0 if resets[b, t] else before + step[b, h, t, m]


@_inner
def _sweep_forwards(inputs, slopes, elapsed, b, h, p, walk, interval, states, last, gradients):
    """The states [2, n] of a lane walk along the sequence again, and all that follows from them.

    last [s, 2, n] takes what is left of them at the last token of each stretch, before that token adds to them.
    """
    C, B, x, u = inputs.C, inputs.B, inputs.x, inputs.u
    state_size, rate = C.shape[3], inputs.rate[h, p]
    exponent, row, grad_rate = _exponents(rate), np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype)
    state, total = np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype)
    state[:], total[:], grad_rate[:] = states[0], states[1], gradients.rate[b, h, p]
    left, left_total = np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype)
    for t in range(*walk):
        if inputs.resets[b, t]:
            state[:], total[:] = 0, 0
        step, since = _of_lane(inputs.step, b, h, t, p), _of_lane(elapsed, b, h, t, p)
        queries, keys, new, unit = C[b, h, t], B[b, h, t], x[b, h, t, p], u[b, h, t, p]
        slope, slope_total, grad_queries = slopes.numerator[b, h, t, p], slopes.denominator[b, h, t, p], gradients.C[b, h, t]
        if _ends_stretch(t, interval, C.shape[2]):
            for n in range(state_size):
                decay = _exp2(exponent[n] * _at(step, n))
                left[n], left_total[n] = decay * state[n], decay * total[n]
            last[t // interval, 0], last[t // interval, 1] = left, left_total
        rated = _nothing(row, step)
        for n in range(state_size):
            decay = _exp2(exponent[n] * _at(step, n))
            kept, kept_total = decay * state[n], decay * total[n]
            state[n] = kept + keys[n] * new
            total[n] = kept_total + keys[n] * unit
            part = slope * kept + slope_total * kept_total
            grad_queries[n] += part
            term = part * queries[n]
            grad_rate[n] -= _at(since, n) * term
            rated = _gather(rated, n, rate[n] * term)
        _add_to_lane(gradients.rated, b, h, t, p, rated)
    states[0], states[1] = state, total
    gradients.rate[b, h, p] = grad_rate


@_inner
def _sweep_backwards(inputs, slopes, elapsed, b, h, p, walk, interval, last, gradients):
    """The adjoint states of a lane walk back, and all that follows; last as `_sweep_forwards` has left it."""
    C, B, x, u = inputs.C, inputs.B, inputs.x, inputs.u
    state_size, rate = C.shape[3], inputs.rate[h, p]
    exponent, row, grad_rate = _exponents(rate), np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype)
    adjoint, adjoint_total = np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype)
    adjoint[:], adjoint_total[:], grad_rate[:] = slopes.h[b, h, p], slopes.z[b, h, p], gradients.rate[b, h, p]
    left, left_total = np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype)
    # As a descending range the vectorised loop would not be run: its check for overlaps, made once for all tokens, wants them ascending.
    for t in np.arange(*walk)[::-1]:
        step, since = _of_lane(inputs.step, b, h, t, p), _of_lane(elapsed, b, h, t, p)
        queries, keys, new, unit = C[b, h, t], B[b, h, t], x[b, h, t, p], u[b, h, t, p]
        slope, slope_total, grad_keys = slopes.numerator[b, h, t, p], slopes.denominator[b, h, t, p], gradients.B[b, h, t]
        grad_new, grad_unit = C.dtype.type(0), C.dtype.type(0)
        counted = C.dtype.type(1)
        if _ends_stretch(t, interval, C.shape[2]):
            counted = C.dtype.type(0)  # the token's own input is not in `last`
            rated = _nothing(row, step)
            left[:], left_total[:] = last[t // interval, 0], last[t // interval, 1]
            for n in range(state_size):
                term = adjoint[n] * left[n] + adjoint_total[n] * left_total[n]
                grad_rate[n] -= _at(since, n) * term
                rated = _gather(rated, n, rate[n] * term)
            _add_to_lane(gradients.ends, b, h, t // interval, p, rated)
        rated = _nothing(row, step)
        for n in range(state_size):
            decay = _exp2(exponent[n] * _at(step, n))
            grad_new += keys[n] * adjoint[n]
            grad_unit += keys[n] * adjoint_total[n]
            part = adjoint[n] * new + adjoint_total[n] * unit
            grad_keys[n] += part
            term = part * keys[n] * counted
            grad_rate[n] += _at(since, n) * term
            rated = _gather(rated, n, -rate[n] * term)
            adjoint[n] = decay * (adjoint[n] + queries[n] * slope)
            adjoint_total[n] = decay * (adjoint_total[n] + queries[n] * slope_total)
        gradients.x[b, h, t, p], gradients.u[b, h, t, p] = grad_new, grad_unit
        _add_to_lane(gradients.rated, b, h, t, p, rated)
        if inputs.resets[b, t]:
            adjoint[:], adjoint_total[:] = 0, 0
    gradients.rate[b, h, p] = grad_rate
    slopes.h[b, h, p], slopes.z[b, h, p] = adjoint, adjoint_total


@_inner
def _sum_rated(rated, ends, resets, b, h, interval, grad_step):
    """grad_step = -rate * q: the running sum starts from its exact value after each stretch and from 0 before each document."""
    running = np.empty_like(rated[b, h, 0])
    seq_len = rated.shape[2]
    for t in range(seq_len - 1, -1, -1):
        for m in range(len(running)):
            after = ends[b, h, t // interval, m] if _ends_stretch(t, interval, seq_len) else running[m]
            running[m] = 0 if resets[b, t] else after + rated[b, h, t, m]
            grad_step[b, h, t, m] = -running[m]


@_over_lanes
def backward(inputs, slopes, state, total, interval, elapsed, gradients, grad_step):
    """Both sweeps from the initial states [b, h, p, n], with stretches of `interval` tokens; elapsed is scratch like step."""
    num_sequences, num_heads, head_dim, state_size = state.shape
    seq_len, num_stretches = inputs.C.shape[2], gradients.ends.shape[2]
    for head in numba.prange(num_sequences * num_heads):  # the channels of a head add to the same gradients of C and B
        b, h = head // num_heads, head % num_heads
        _sum_steps(_numbers(inputs.step), inputs.resets, b, h, interval, _numbers(elapsed))
        states = np.empty((head_dim, 2, state_size), state.dtype)
        states[:, 0], states[:, 1] = state[b, h], total[b, h]
        last = np.empty((head_dim, num_stretches, 2, state_size), state.dtype)
        num_walks = -(-seq_len // _WALK)
        for number in range(num_walks):
            for p in range(head_dim):
                _sweep_forwards(inputs, slopes, elapsed, b, h, p, _walk(number, seq_len), interval, states[p], last[p], gradients)
        for number in np.arange(num_walks)[::-1]:
            for p in range(head_dim):
                _sweep_backwards(inputs, slopes, elapsed, b, h, p, _walk(number, seq_len), interval, last[p], gradients)
        rated, ends = _numbers(gradients.rated), _numbers(gradients.ends)
        _sum_rated(rated, ends, inputs.resets, b, h, interval, _numbers(grad_step))
