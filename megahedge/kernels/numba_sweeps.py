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

# Sums over n may be taken in any order, which vector instructions need; NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}
_inner = numba.njit(cache=True, fastmath=_FAST, error_model="numpy")
_over_lanes = numba.njit(cache=True, parallel=True, fastmath=_FAST, error_model="numpy")


class Inputs(NamedTuple):
    """Of a scan, all contiguous and of one dtype."""

    C: np.ndarray
    """[b, t, h, n]"""
    B: np.ndarray
    """[b, t, h, n]"""
    x: np.ndarray
    """What the numerator takes in, [b, t, h, p]."""
    u: np.ndarray
    """What the denominator takes in, [b, t, h, p]."""
    step: np.ndarray
    """[b, t, h, n] if by_state, else [b, t, h, p]"""
    rate: np.ndarray
    """[h, p, n]"""
    resets: np.ndarray
    """[b, t] bool: nothing is kept of the tokens before."""
    by_state: bool


class Slopes(NamedTuple):
    """Gradients of what the forward pass has returned."""

    numerator: np.ndarray
    """[b, t, h, p]"""
    denominator: np.ndarray
    """[b, t, h, p]"""
    h: np.ndarray
    """Of the last state, [b, h, p, n]; the sweep backwards leaves the gradient of the initial state in it."""
    z: np.ndarray
    """The same of the denominator."""


class Gradients(NamedTuple):
    """What the two sweeps fill; zero before."""

    C: np.ndarray
    """But for what a token gives to itself, [b, t, h, n]; so are B, x and u."""
    B: np.ndarray
    x: np.ndarray
    u: np.ndarray
    rate: np.ndarray
    """[b, h, p, n]"""
    rated: np.ndarray
    """What each token adds to the running sum rate * q of loop.py, like step."""
    ends: np.ndarray
    """That sum after each stretch, [b, s, h, n | p]."""


_LOG2_E = np.float32(1 / math.log(2))
_P1, _P2, _P3, _P4, _P5, _P6, _P7 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(1, 8))


@_inner
def _exp_in_fp32(x):
    """2^f 2^k with k whole and |f| <= 1/2, 2^f from its series up to f^7 (error 3e-9): unlike a call of exp it can be vectorised.

    Below 2^-126 it gives 2^-126, and for NaN it gives NaN.
    """
    x = x * _LOG2_E
    x = np.float32(-126) if x < np.float32(-126) else x
    k = np.rint(x)
    f = x - k
    p = _P1 + f * (_P2 + f * (_P3 + f * (_P4 + f * (_P5 + f * (_P6 + f * _P7)))))
    return (np.float32(1) + f * p) * np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)


def _exp(x):
    """e^x for x <= 0."""
    return math.exp(x)


@overload(_exp)
def _choose_exp(x):
    if x == types.float32:
        return lambda x: _exp_in_fp32(x)
    return lambda x: math.exp(x)


# The vectoriser gives up on a loop that writes to several arrays which may overlap.  Arrays made in the same function cannot, so each sweep
# works on rows of its own, made by np.zeros, and copies in and out.


@_inner
def _scan_lane(inputs, b, h, p, states, totals, numerator, denominator):
    C, B, x, u, by_state = inputs.C, inputs.B, inputs.x, inputs.u, inputs.by_state
    state_size, rate = C.shape[3], inputs.rate[h, p]
    state, total, step = np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype)
    state[:], total[:] = states[b, h, p], totals[b, h, p]
    for t in range(C.shape[1]):
        if inputs.resets[b, t]:
            state[:], total[:] = 0, 0
        if by_state:
            step[:] = inputs.step[b, t, h]
        else:
            step[:] = inputs.step[b, t, h, p]
        queries, keys, new, unit = C[b, t, h], B[b, t, h], x[b, t, h, p], u[b, t, h, p]
        read, read_total = C.dtype.type(0), C.dtype.type(0)
        for n in range(state_size):
            decay = _exp(-rate[n] * step[n])
            kept, kept_total = decay * state[n], decay * total[n]
            read += queries[n] * kept
            read_total += queries[n] * kept_total
            state[n] = kept + keys[n] * new
            total[n] = kept_total + keys[n] * unit
        numerator[b, t, h, p], denominator[b, t, h, p] = read, read_total
    states[b, h, p], totals[b, h, p] = state, total


@_over_lanes
def forward(inputs, state, total, numerator, denominator):
    """Fill numerator and denominator [b, t, h, p] with what each token reads of those before it; the states [b, h, p, n] move on."""
    num_sequences, num_heads, head_dim, _ = state.shape
    for lane in numba.prange(num_sequences * num_heads * head_dim):
        b, h, p = lane // (num_heads * head_dim), lane // head_dim % num_heads, lane % head_dim
        _scan_lane(inputs, b, h, p, state, total, numerator, denominator)


@_inner
def _ends_stretch(t, seq_len, interval):
    return (t + 1) % interval == 0 or t + 1 == seq_len


@_inner
def _sum_steps(step, resets, b, h, interval, elapsed):
    """elapsed = sum of steps since the token's stretch or its document began, like step."""
    for t in range(step.shape[1]):
        for m in range(step.shape[3]):
            before = 0 if t % interval == 0 else elapsed[b, t - 1, h, m]
            elapsed[b, t, h, m] = 0 if resets[b, t] else before + step[b, t, h, m]


@_inner
def _sweep_forwards(inputs, slopes, elapsed, b, h, p, states, totals, interval, checkpoints, gradients):
    """The states of a lane again, kept in checkpoints [s, 2, n] after each stretch, and all that follows from them."""
    C, B, x, u, by_state = inputs.C, inputs.B, inputs.x, inputs.u, inputs.by_state
    seq_len, state_size, rate = C.shape[1], C.shape[3], inputs.rate[h, p]
    state, total, step = np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype)
    since, rated, grad_rate = np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype)
    state[:], total[:] = states[b, h, p], totals[b, h, p]
    for t in range(seq_len):
        if inputs.resets[b, t]:
            state[:], total[:] = 0, 0
        if by_state:
            step[:], since[:] = inputs.step[b, t, h], elapsed[b, t, h]
        else:
            step[:], since[:] = inputs.step[b, t, h, p], elapsed[b, t, h, p]
        queries, keys, new, unit = C[b, t, h], B[b, t, h], x[b, t, h, p], u[b, t, h, p]
        slope, slope_total, grad_queries = slopes.numerator[b, t, h, p], slopes.denominator[b, t, h, p], gradients.C[b, t, h]
        for n in range(state_size):
            decay = _exp(-rate[n] * step[n])
            kept, kept_total = decay * state[n], decay * total[n]
            state[n] = kept + keys[n] * new
            total[n] = kept_total + keys[n] * unit
            part = slope * kept + slope_total * kept_total
            grad_queries[n] += part
            term = part * queries[n]
            grad_rate[n] -= since[n] * term
            rated[n] = rate[n] * term
        _add_rated(gradients.rated, b, t, h, p, by_state, rated)
        if _ends_stretch(t, seq_len, interval):
            checkpoints[t // interval, 0], checkpoints[t // interval, 1] = state, total
    gradients.rate[b, h, p] = grad_rate


@_inner
def _sweep_backwards(inputs, slopes, elapsed, b, h, p, interval, checkpoints, gradients):
    """The adjoint states of a lane, and all that follows from them."""
    C, B, x, u, by_state = inputs.C, inputs.B, inputs.x, inputs.u, inputs.by_state
    seq_len, state_size, rate = C.shape[1], C.shape[3], inputs.rate[h, p]
    adjoint, adjoint_total, step = np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype)
    since, rated, grad_rate = np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype), np.zeros(state_size, C.dtype)
    adjoint[:], adjoint_total[:], grad_rate[:] = slopes.h[b, h, p], slopes.z[b, h, p], gradients.rate[b, h, p]
    # As a descending range the vectorised loop would not be run: its check for overlaps, made once for all tokens, wants them ascending.
    for t in np.arange(seq_len)[::-1]:
        if by_state:
            step[:], since[:] = inputs.step[b, t, h], elapsed[b, t, h]
        else:
            step[:], since[:] = inputs.step[b, t, h, p], elapsed[b, t, h, p]
        if _ends_stretch(t, seq_len, interval):
            state, total = checkpoints[t // interval, 0], checkpoints[t // interval, 1]
            for n in range(state_size):
                term = adjoint[n] * state[n] + adjoint_total[n] * total[n]
                grad_rate[n] -= since[n] * term
                rated[n] = rate[n] * term
            _add_rated(gradients.ends, b, t // interval, h, p, by_state, rated)
        queries, keys, new, unit = C[b, t, h], B[b, t, h], x[b, t, h, p], u[b, t, h, p]
        slope, slope_total, grad_keys = slopes.numerator[b, t, h, p], slopes.denominator[b, t, h, p], gradients.B[b, t, h]
        grad_new, grad_unit = C.dtype.type(0), C.dtype.type(0)
        for n in range(state_size):
            decay = _exp(-rate[n] * step[n])
            grad_new += keys[n] * adjoint[n]
            grad_unit += keys[n] * adjoint_total[n]
            part = adjoint[n] * new + adjoint_total[n] * unit
            grad_keys[n] += part
            term = part * keys[n]
            grad_rate[n] += since[n] * term
            rated[n] = -rate[n] * term
            adjoint[n] = decay * (adjoint[n] + queries[n] * slope)
            adjoint_total[n] = decay * (adjoint_total[n] + queries[n] * slope_total)
        gradients.x[b, t, h, p], gradients.u[b, t, h, p] = grad_new, grad_unit
        _add_rated(gradients.rated, b, t, h, p, by_state, rated)
        if inputs.resets[b, t]:
            adjoint[:], adjoint_total[:] = 0, 0
    gradients.rate[b, h, p] = grad_rate
    slopes.h[b, h, p], slopes.z[b, h, p] = adjoint, adjoint_total


@_inner
def _add_rated(rated, b, t, h, p, by_state, row):
    """Add rate * q of one lane to that of its head, or of its own."""
    if by_state:
        here = rated[b, t, h]
        for n in range(len(row)):
            here[n] += row[n]
    else:
        total = row.dtype.type(0)
        for n in range(len(row)):
            total += row[n]
        rated[b, t, h, p] += total


@_inner
def _sum_rated(gradients, resets, b, h, interval, grad_step):
    """grad_step = -rate * q: the running sum starts from its exact value after each stretch and from 0 before each document."""
    rated, ends = gradients.rated, gradients.ends
    running = np.empty_like(rated[b, 0, h])
    seq_len = rated.shape[1]
    for t in range(seq_len - 1, -1, -1):
        for m in range(len(running)):
            after = ends[b, t // interval, h, m] if _ends_stretch(t, seq_len, interval) else running[m]
            running[m] = 0 if resets[b, t] else after + rated[b, t, h, m]
            grad_step[b, t, h, m] = -running[m]


@_over_lanes
def backward(inputs, slopes, state, total, interval, elapsed, gradients, grad_step):
    """Both sweeps from the initial states [b, h, p, n], with stretches of `interval` tokens; elapsed is scratch like step."""
    num_sequences, num_heads, head_dim, state_size = state.shape
    for head in numba.prange(num_sequences * num_heads):  # the channels of a head add to the same gradients of C and B
        b, h = head // num_heads, head % num_heads
        _sum_steps(inputs.step, inputs.resets, b, h, interval, elapsed)
        checkpoints = np.empty((gradients.ends.shape[1], 2, state_size), state.dtype)
        for p in range(head_dim):
            _sweep_forwards(inputs, slopes, elapsed, b, h, p, state, total, interval, checkpoints, gradients)
            _sweep_backwards(inputs, slopes, elapsed, b, h, p, interval, checkpoints, gradients)
        _sum_rated(gradients, inputs.resets, b, h, interval, grad_step)
