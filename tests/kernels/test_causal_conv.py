"""The short convolution: taps, states, documents."""

import itertools

import pytest
import torch
from torch.nn.functional import conv1d, pad

from megahedge.kernels import causal_conv


def example(batch=2, seq_len=9, channels=3, num_taps=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, seq_len, channels), (channels, num_taps), (channels,), (batch, num_taps - 1, channels))
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("num_taps", (1, 2, 4))
@pytest.mark.parametrize("seq_len", (1, 2, 3, 64))
def test_conv_equals_torch_conv1d_with_all_gradients(seq_len, num_taps):
    x, weight, bias, initial = leaves = example(seq_len=seq_len, num_taps=num_taps)
    y, last = causal_conv(x, weight, bias, initial=initial)
    padded = torch.cat((initial, x), dim=1)
    expected = conv1d(padded.mT, weight.unsqueeze(1), bias, groups=3).mT
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(last, padded[:, seq_len:])
    grads = (torch.autograd.grad(out.square().sum(), leaves) for out in (y, expected))
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_identity_taps_give_back_the_input_bit_for_bit(dtype):
    x = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    boundaries = torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) < 0.4
    weight = pad(torch.ones(3, 1), (3, 0))
    y, _ = causal_conv(x, weight, torch.zeros(3), boundaries=boundaries)
    assert y.dtype == dtype
    assert torch.equal(y, x)


def test_the_last_tap_is_the_current_token():
    x = torch.arange(1.0, 5.0).view(1, 4, 1)
    y, _ = causal_conv(x, torch.tensor([[0.0, 1.0, 0.0]]))
    assert y.flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("cut", (1, 2, 5))
def test_two_halves_equal_one_convolution(cut):
    x, weight, bias, initial = example()
    y, last = causal_conv(x, weight, bias, initial=initial)
    first, middle = causal_conv(x[:, :cut], weight, bias, initial=initial)
    second, end = causal_conv(x[:, cut:], weight, bias, initial=middle)
    assert torch.equal(torch.cat((first, second), dim=1), y)
    assert torch.equal(end, last)


@pytest.mark.parametrize("starts", ([0, 1, 4, 5], [3], [0], [8], [7]))
def test_packed_documents_equal_documents_apart(starts):
    x, weight, bias, initial = leaves = example()
    boundaries = torch.zeros(2, 9, dtype=torch.bool)
    boundaries[:, starts] = True
    packed, last = causal_conv(x, weight, bias, initial=initial, boundaries=boundaries)
    ends = sorted({0, *starts, 9})
    pieces = []
    for start, stop in itertools.pairwise(ends):
        pieces.append(causal_conv(x[:, start:stop], weight, bias, initial=None if start in starts else initial))
    apart = torch.cat([y for y, _ in pieces], dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-12, atol=1e-12)
    assert torch.equal(last, pieces[-1][1])
    grads = (torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True) for out in (packed, apart))
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


def test_sequences_of_a_batch_have_their_own_documents():
    x, weight, bias, _ = example()
    boundaries = torch.zeros(2, 9, dtype=torch.bool)
    boundaries[1, 4] = True
    y, _ = causal_conv(x, weight, bias, boundaries=boundaries)
    plain, _ = causal_conv(x, weight, bias)
    assert torch.equal(y[0], plain[0])
    assert not torch.allclose(y[1], plain[1])


def test_shapes_that_do_not_fit_are_refused():
    x, weight, bias, initial = example()
    with pytest.raises(ValueError, match=r"weight is \[d, k\]"):
        causal_conv(x, weight[:2], bias)
    with pytest.raises(ValueError, match=r"k > 0, not \[3, 0\]"):
        causal_conv(x, weight[:, :0], bias)
    with pytest.raises(ValueError, match=r"weight is \[d, k\] with d = 3, k > 0, not \[\]"):
        causal_conv(x, weight.sum(), bias)
    with pytest.raises(ValueError, match=r"bias is \[d\] with d = 3, not \[2\]"):
        causal_conv(x, weight, bias[:2])
    for wrong in (x[0], x[None], x.long()):
        with pytest.raises(ValueError, match=r"x is \[b, t, d\] floating-point, not"):
            causal_conv(wrong, weight, bias)
    with pytest.raises(ValueError, match=r"initial is \[b, k - 1, d\] = \[2, 3, 3\], not \[2, 2, 3\]"):
        causal_conv(x, weight, bias, initial=initial[:, 1:])
    for boundaries in (torch.zeros(1, 5, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.bool), torch.zeros(2, 5)):
        with pytest.raises(ValueError, match=r"boundaries is \[b, t\] = \[2, 5\] bool"):
            causal_conv(torch.zeros(2, 5, 3), torch.zeros(3, 4), boundaries=boundaries)
