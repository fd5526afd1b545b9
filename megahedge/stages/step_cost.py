"""What a step of a stage takes beyond its parameters: the stage's own code, run on the meta device, where tensors have shapes alone.

Nothing here knows a formula of a layer.  Every tensor that the forward and the backward make is counted while it lives, and every
matrix product with its operations, so that a change of the model changes what is counted.
"""

# b batch, t seq_len

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megahedge.config.model import ModelConfig
from megahedge.parallel.topology import TensorParallel
from megahedge.stages.base import Stage
from megahedge.training.timing import product_operations


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Forward and backward of one micro-batch on one rank, without parameters and their gradients."""

    kept: int
    """Bytes that the forward leaves for the backward: activations, and the states of scans between segments."""
    kept_by_mixers: int
    """Those among them that token mixers made: projections, features, scan."""
    peak: int
    """Most bytes at one moment."""
    head_peak: int
    """Most bytes at one moment of head and loss."""
    flops: int
    """Operations of matrix products, a multiplication and an addition counted as two; recomputation included."""
    operations: int
    """Calls of torch operations, each one a launch on a GPU, more or less."""

    @property
    def working(self) -> int:
        """Bytes beyond `kept` at the peak."""
        return self.peak - self.kept

    @property
    def head_working(self) -> int:
        """The same of head and loss: the logits of a block of tokens and what is made of them."""
        return max(0, self.head_peak - self.kept)


def step_cost(
    stage_type: type[Stage], model: ModelConfig, options, micro_batch_size: int, dtype: torch.dtype, *, zero3: bool = False
) -> StepCost:
    """Count a micro-batch of [micro_batch_size, options.seq_len] tokens at options.tp_size, parameters in `dtype`.

    Layers are alike, so that models of one and of two layers tell what all of them take.
    zero3: as code behaves that asks whether ZeRO 3 has the parameters (stage 1 does).
    """
    few = [dataclasses.replace(model, num_layers=count) for count in (1, 2)]
    one, two = (_count(stage_type, config, options, micro_batch_size, dtype, zero3) for config in few)
    fields = (field.name for field in dataclasses.fields(StepCost))
    return StepCost(**{name: getattr(one, name) + (model.num_layers - 1) * (getattr(two, name) - getattr(one, name)) for name in fields})


def build_on_meta(stage_type: type[Stage], model: ModelConfig, options) -> Stage:
    """The stage's module as rank 0 of a TP group holds it, without memory for its parameters."""
    with torch.device("meta"):
        return stage_type(model, TensorParallel(None, 0, options.tp_size), options)


def _count(stage_type: type[Stage], model: ModelConfig, options, micro_batch_size: int, dtype: torch.dtype, zero3: bool) -> StepCost:
    stage = build_on_meta(stage_type, model, options)
    for number, parameter in enumerate(stage.parameters()):
        parameter.data = parameter.data.to(dtype)
        if zero3:
            parameter.ds_id = number  # DeepSpeed's mark
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    tokens = torch.zeros(micro_batch_size, options.seq_len, dtype=torch.long, device="meta")
    stage.train()
    with _flash_attention(), _Counter(stage, tokens) as counter:
        loss, metrics = stage(tokens, tokens)
        del metrics
        kept, kept_by_mixers = counter.live, counter.live_of_mixers
        loss.backward()
    return StepCost(kept, kept_by_mixers, counter.peak, counter.head_peak, counter.flops, counter.operations)


def _drop_gradient(parameter: nn.Parameter) -> None:
    """Gradients of parameters have a row of their own in a plan."""
    parameter.grad = None


@contextlib.contextmanager
def _flash_attention() -> Iterator[None]:
    """Within `with`, attention is the kernel that CUDA runs; the meta device would hold the scores of all pairs.

    The function itself is replaced, because no torch mode reaches what autograd recomputes.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        assert attn_mask is None
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    with mock.patch.object(nn.functional, "scaled_dot_product_attention", attend):
        yield


class _Counter(TorchDispatchMode):
    """Bytes of the storages made within `with` that are alive, and the cost of what is called."""

    def __init__(self, stage: Stage, *inputs: Tensor):
        super().__init__()
        self.live = self.live_of_mixers = self.peak = self.head_peak = self.flops = self.operations = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in (*stage.parameters(), *inputs)}
        self._in_mixer = self._in_head = 0
        for module in stage.modules():
            if module is stage.student.lm_head:
                self._watch(module, "_in_head")
        for block in stage.student.blocks:
            self._watch(block.mixer, "_in_mixer")

    def _watch(self, module: nn.Module, depth: str) -> None:
        """Let attribute `depth` say whether the module is being called."""

        def step(by: int, *_) -> None:
            setattr(self, depth, getattr(self, depth) + by)

        module.register_forward_pre_hook(functools.partial(step, 1))
        module.register_forward_hook(functools.partial(step, -1))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            return 0.0  # the scan asks how strong its decay is: at hand-over there is none
        result = function(*args, **kwargs)
        self.operations += 1
        self.flops += product_operations(function, args, kwargs, result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        if self._in_head:
            self.head_peak = max(self.head_peak, self.live)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            of_mixer = bool(self._in_mixer)
            self._change(storage.nbytes(), of_mixer)
            weakref.finalize(storage, self._forget, key, storage.nbytes(), of_mixer)

    def _forget(self, key: int, size: int, of_mixer: bool) -> None:
        self._seen.discard(key)
        self._change(-size, of_mixer)

    def _change(self, size: int, of_mixer: bool) -> None:
        self.live += size
        self.live_of_mixers += size if of_mixer else 0
