"""What memory the Triton scans take beside inputs, results and gradients, at the shapes of a model of a billion parameters.

Nothing runs: tensors have no memory, kernels are not launched, and what is allocated is counted.
"""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="triton is not installed")

from megahedge.kernels import scan
from tests.gpu.compile_table import as_on_gpu
from tests.gpu.configurations import CONFIGURATIONS

PYTHIA_1B = {"head_dim": 256, "heads": 8}
BATCH, SEQ_LEN = 8, 1024
MULTIPLES = {
    (torch.bfloat16, "channel"): 5.0,
    (torch.bfloat16, "none"): 1.1,
    (torch.bfloat16, "head"): 1.1,
    (torch.bfloat16, "state"): 2.0,
    (torch.float32, "channel"): 5.0,
    (torch.float32, "none"): 2.7,
    (torch.float32, "head"): 2.7,
    (torch.float32, "state"): 3.1,
}
"""The most of it at any moment in bytes of C, B, V and step, by dtype of V and structure.  A launch takes some sequences, so of a batch
of 8 it is what one (chunks) or two (channel) of them need; short chunks of fp32 have many states."""


class Peak(TorchDispatchMode):
    """Counts bytes of tensors that are made within `with`, for as long as they live; `known` are there already."""

    def __init__(self, *known: torch.Tensor):
        super().__init__()
        self.now = self.most = 0
        self._known = {x.untyped_storage()._cdata for x in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def bytes_of(*tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_workspaces_are_a_stated_multiple_of_the_inputs(configuration):
    arguments = configuration.inputs(batch=BATCH, seq_len=SEQ_LEN, **PYTHIA_1B)
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    inputs = bytes_of(*(arguments.get(name) for name in ("C", "B", "V", "step")))
    with as_on_gpu(90) as launches, Peak(*(x for x in arguments.values() if isinstance(x, torch.Tensor))) as peak:
        y, state = scan(**arguments, backend="triton")
        forward = peak.most - bytes_of(y, state.numerator, state.denominator)
        slopes = torch.empty_like(y), torch.empty_like(state.numerator)
        before, peak.most = peak.now, peak.now
        gradients = torch.autograd.grad((y, state.numerator), leaves, slopes)
    backward = peak.most - before - bytes_of(*gradients)
    assert len(launches) >= 3
    assert max(forward, backward) <= MULTIPLES[configuration.dtype, configuration.structure] * inputs
