"""Where the time of training goes, and what it buys: seconds by part, operations of a step, peak memory.

Nothing here waits for a GPU: its parts are bounded by events, which are read when they are past.
"""

import contextlib
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megahedge.utils.recomputation import is_recomputing

STEP_PARTS = ("data", "forward", "backward", "optimizer", "communication")
"""Communication is what a rank waits for in collectives; it lies within the other parts."""
PARTS = (*STEP_PARTS, "save", "evaluation")
_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "broadcast", "reduce", "alltoall", "alltoall_base",
)  # fmt: skip
"""Methods of torch's process groups.  Gloo works behind a handle that is waited for; NCCL puts what is not asked to be asynchronous on the
current stream and gives no handle."""


class StepTimer:
    """Seconds that this rank has spent in each part since the last `take`."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens within `with` as a part: the device's work where it runs on a GPU."""
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            with self.host_part(name):
                yield

    @contextlib.contextmanager
    def host_part(self, name: str) -> Iterator[None]:
        """Count a part that the host does, or waits for, whatever the device."""
        start = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - start

    @contextlib.contextmanager
    def watching_collectives(self) -> Iterator[None]:
        """Within `with`, collectives, DeepSpeed's and ours, count as communication: their calls, and the waits for their handles."""
        with contextlib.ExitStack() as patches:
            for owner, name in ((Work, "wait"), *((ProcessGroup, name) for name in _COLLECTIVES)):
                patches.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name))))
            yield

    def _timed(self, function: Callable) -> Callable:
        def timed(*arguments, **keywords):
            with self.part("communication"):
                return function(*arguments, **keywords)

        return timed

    def take(self) -> dict[str, float]:
        """Seconds by part, those of parts that there were; counts begin anew.  What a GPU is still at comes with the next call."""
        pending = []
        for name, start, end in self._events:
            if end.query():
                self._seconds[name] += start.elapsed_time(end) / 1e3
            else:
                pending.append((name, start, end))
        taken = {name: self._seconds[name] for name in PARTS if name in self._seconds}
        self._events, self._seconds = pending, defaultdict(float)
        return taken


def _attention(q, k, v, *arguments, **keywords) -> int:
    return sdpa_flop_count(q.shape, k.shape, v.shape)


def _attention_backward(gradient, q, k, v, *arguments, **keywords) -> int:
    return sdpa_backward_flop_count(gradient.shape, q.shape, k.shape, v.shape)


# torch knows those of the GPU alone
_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
_FORMULAS = flop_registry | _ON_CPU


def product_operations(function, arguments, keywords, result) -> int:
    """Operations of a call of a torch function that is made of matrix products, a multiplication and an addition as two; 0 for others.

    Those of attention are counted as if it had no mask.
    """
    formula = _FORMULAS.get(function._overloadpacket)
    return formula(*arguments, **keywords, out_val=result) if formula is not None else 0


class OperationCounter(TorchDispatchMode):
    """Counts the operations of matrix products within `with`, but for those of activations that are computed again for a backward.

    What torch does not dispatch (numba's scans) is not seen.
    """

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not is_recomputing():
            self.operations += product_operations(function, args, kwargs, result)
        return result


def peak_memory_gib(device: torch.device) -> float:
    """Most memory that this rank has held so far, GiB: torch's tensors on a GPU, else the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
