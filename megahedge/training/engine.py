"""The DeepSpeed engine as the loop sees it: one optimizer step, agreed by all ranks, and the exact state behind it.

DeepSpeed owns gradients, communication and partitioning.  What it lacks is added here: one agreement a step on whether the update
may happen, and access to masters and moments in full shape for topology-free checkpoints.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megahedge.config.options import BatchPlan, TrainOptions
from megahedge.data.loader import Batch
from megahedge.parallel.sharding import Index, read_shard, unshard
from megahedge.parallel.topology import Topology
from megahedge.training.ds_config import load_ds_config, merge_ds_config, zero_stage
from megahedge.training.optim import build_optimizer
from megahedge.training.timing import OperationCounter, StepTimer

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one optimizer step was, the same on every rank."""

    loss: float
    """Mean over the global batch."""
    metrics: dict[str, float]
    """The module's own scalars, averaged likewise."""
    grad_norm: float
    """L2 norm of the gradient before clipping."""
    applied: bool
    """False where the update did not happen: a loss or a gradient was not finite, or DeepSpeed found that their norm is not."""
    bad_samples: list[int]
    """Sample numbers of the micro-batches with a loss or gradient that is not finite; empty where only the sum of gradients overflowed."""
    stop_requested: bool
    """Whether any rank has asked to stop."""


class TrainingEngine:
    """DeepSpeed around a module whose forward(tokens, labels) returns (loss, metrics), and whose trainable parameters are the student's.

    The module's parameters must hold their starting values in fp32 when the engine is made: bf16 masters are set from them.
    """

    def __init__(self, module: nn.Module, student: nn.Module, options: TrainOptions, plan: BatchPlan, topology: Topology):
        import deepspeed

        config = merge_ds_config(load_ds_config(options.ds_config), options, plan)
        self.module = module
        self.topology = topology
        self.zero_stage = zero_stage(config)
        self.optimizer = build_optimizer(module, options)
        self.parameters = {name: parameter for name, parameter in student.named_parameters() if parameter.requires_grad}
        assert len(self.parameters) == sum(parameter.requires_grad for parameter in module.parameters())
        self._gradients = _GradientWatch(self.parameters)
        starting_values = self._starting_values(options)
        # `mpu` only where there is something to say: with one, DeepSpeed takes slower paths
        self.deepspeed, *_ = deepspeed.initialize(
            model=module,
            optimizer=self.optimizer,
            config=config,
            mpu=topology.mpu if topology.tp_size > 1 else None,
            dist_init_required=False,
        )
        self._make_moments()
        self.device = self.deepspeed.device
        self.timer = StepTimer(self.device)
        self.operations: int | None = None
        """Of this rank's matrix products in a step, without recomputation; counted in the first one."""
        for name, value in starting_values.items():
            self._write(name, value.to(self.device))

    def _starting_values(self, options: TrainOptions) -> dict[str, Tensor]:
        """fp32 copies of what DeepSpeed is about to round to bf16; empty where it rounds nothing."""
        if options.dtype == "fp32" or self.zero_stage == 0:
            return {}
        return {name: parameter.detach().to("cpu", torch.float32, copy=True) for name, parameter in self.parameters.items()}

    def _make_moments(self) -> None:
        """Make the moments before the first update, so that they can be read and written from the start.

        DeepSpeed 0.19 makes and links them in its first update, and not at all where that one is skipped.
        """
        zero = self.deepspeed.optimizer
        if self.zero_stage == 3:
            self.optimizer.make_state(zero.fp32_partitioned_groups_flat)
            return
        self.optimizer.make_state()
        if self.zero_stage > 0:
            zero._lazy_init_hp_params_optimizer_state()

    # ---- one step -------------------------------------------------------------------------------------------------------------

    def train_step(self, micro_batches: Iterable[Batch], lr: float, *, stop_requested: bool = False) -> StepResult:
        """Forward and backward of this rank's micro-batches, then one update agreed by all ranks."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.deepspeed.train()
        with self.timer.watching_collectives(), self._counting_operations():
            return self._train_step(micro_batches, stop_requested)

    def _train_step(self, micro_batches: Iterable[Batch], stop_requested: bool) -> StepResult:
        scalars, finite, positions = [], [], []
        for batch, is_last in _mark_last(self._timed(micro_batches)):
            with self.timer.part("forward"):
                loss, metrics = self.deepspeed(*batch.inputs(self.device))
            with self.timer.part("backward"):
                self.deepspeed.backward(loss)
            scalars.append(torch.stack([value.detach().float() for value in (loss, *metrics.values())]))
            finite.append(torch.isfinite(scalars[-1][0]) & self._gradients.take_finite())
            positions.append(batch.positions)
            if is_last:
                means, all_finite, stop = self._agree(torch.stack(scalars).mean(0), torch.stack(finite).all(), stop_requested)
                self.optimizer.enabled = all_finite
                grad_norm = self._gradient_norm_at_stage_0() if self.zero_stage == 0 else None
            with self.timer.part("optimizer"):
                self.deepspeed.step()
        self.optimizer.enabled = True
        self._gradients.check_complete()
        if grad_norm is None:
            grad_norm = float(self.deepspeed.get_global_grad_norm() or 0.0)
        return StepResult(
            loss=means[0],
            metrics=dict(zip(metrics, means[1:], strict=True)),
            grad_norm=grad_norm,
            applied=all_finite and self.deepspeed.was_step_applied(),
            bad_samples=[] if all_finite else self._gather_bad(finite, positions),
            stop_requested=stop,
        )

    def _timed(self, micro_batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; what the host waits for them counts as `data`."""
        iterator = iter(micro_batches)
        while True:
            with self.timer.host_part("data"):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    @contextlib.contextmanager
    def _counting_operations(self) -> Iterator[None]:
        """Within `with`, the first step's operations are counted."""
        if self.operations is not None:
            yield
            return
        with OperationCounter() as counter:
            yield
        self.operations = counter.operations

    def _agree(self, means: Tensor, finite: Tensor, stop_requested: bool) -> tuple[list[float], bool, bool]:
        """One all-reduce a step: mean losses over DP ranks, and whether any rank saw a non-finite value or was asked to stop."""
        flags = torch.stack([~finite, torch.tensor(stop_requested, device=means.device)])
        packed = torch.cat([means, flags.float()])
        dist.all_reduce(packed)
        values = (packed / dist.get_world_size()).tolist()
        return values[:-2], values[-2] == 0.0, values[-1] > 0.0

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank says so; collective."""
        flags = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(flags)
        return bool(flags > 0)

    def _gather_bad(self, finite: list[Tensor], positions: list[tuple[int, ...]]) -> list[int]:
        """Sample numbers of the micro-batches, on any rank, whose loss or own gradient was not finite."""
        mine = [sample for flag, part in zip(finite, positions, strict=True) if not flag for sample in part]
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        return sorted({sample for part in gathered for sample in part})

    def _gradient_norm_at_stage_0(self) -> float:
        """DeepSpeed clips at stage 0 without telling the norm; each distinct element is counted once over the TP group."""
        shared, sharded = torch.zeros(2, device=self.device).unbind()
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                square = parameter.grad.float().square().sum()
                if parameter.shard_spec.dim is None:
                    shared = shared + square
                else:
                    sharded = sharded + square
        if self.topology.tp_size > 1:
            dist.all_reduce(sharded, group=self.topology.tp_group)
        return float((shared + sharded).sqrt())

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The wrapped module in eval mode without gradients; calls must go through it so that ZeRO-3 gathers parameters."""
        self.deepspeed.eval()
        with torch.no_grad():
            yield self.deepspeed
        self.deepspeed.train()

    # ---- the exact state, in full shapes --------------------------------------------------------------------------------------

    def read_full(self, name: str, moment: str | None = None) -> Tensor:
        """A trainable parameter's fp32 master, or one of its moments, whole.  Collective: every rank calls it for the same name."""
        return self._unshard(self.parameters[name], self._read(name, moment))

    def write(self, name: str, read: Callable[[Index], Tensor], moment: str | None = None) -> None:
        """Set this rank's part of a master or moment; `read` gives the piece of the whole tensor at an index."""
        piece = read_shard(read, self.parameters[name].shard_spec, self.topology.tp_rank, self.topology.tp_size)
        self._write(name, piece.to(self.device, torch.float32), moment)

    def _read(self, name: str, moment: str | None) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self.parameters[name]
        if self.zero_stage == 0:
            return (parameter if moment is None else self.optimizer.state[parameter][moment]).detach()
        return safe_get_full_fp32_param(parameter) if moment is None else safe_get_full_optimizer_state(parameter, moment)

    def _write(self, name: str, value: Tensor, moment: str | None = None) -> None:
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        parameter = self.parameters[name]
        if self.zero_stage == 0:
            target = parameter if moment is None else self.optimizer.state[parameter][moment]
            with torch.no_grad():
                target.copy_(value)
        elif self.zero_stage == 3:
            # DeepSpeed's setter of whole tensors fails where the ranks do not divide them
            part = self._own_partition(parameter, value)
            if moment is None:
                safe_set_local_fp32_param(parameter, part)
            else:
                safe_set_local_optimizer_state(parameter, part, moment)
        elif moment is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, moment)

    def _own_partition(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """This rank's piece of a tensor as ZeRO-3 cuts it: flattened, in equal parts, the last ones padded."""
        size = parameter.ds_tensor.numel()
        padded = nn.functional.pad(value.flatten(), (0, size * self.topology.dp_size - value.numel()))
        return padded.narrow(0, size * self.topology.dp_rank, size)

    def _unshard(self, parameter: nn.Parameter, local: Tensor) -> Tensor:
        spec = parameter.shard_spec
        if spec.dim is None or self.topology.tp_size == 1:
            return unshard([local], spec)
        pieces = [torch.empty_like(local) for _ in range(self.topology.tp_size)]
        dist.all_gather(pieces, local.contiguous(), group=self.topology.tp_group)
        return unshard(pieces, spec)

    def set_update_count(self, count: int) -> None:
        """Tell AdamW's bias correction how many updates there have been."""
        for state in self.optimizer.state.values():
            state["step"].fill_(float(count))


def _mark_last(items: Iterable) -> Iterator[tuple[object, bool]]:
    """Each item, and whether it is the last."""
    iterator = iter(items)
    item = next(iterator)
    for following in iterator:
        yield item, False
        item = following
    yield item, True


class _GradientWatch:
    """Watches the gradients of one rank as autograd delivers them, before DeepSpeed reduces or partitions them.

    Its flag stays on the device, so nothing waits until somebody reads it.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]):
        self._unseen = set(parameters)
        self._flags: list[Tensor] = []
        for name, parameter in parameters.items():
            parameter.register_hook(self._hook(name))

    def _hook(self, name: str):
        def watch(gradient: Tensor) -> None:
            self._unseen.discard(name)
            self._flags.append(torch.isfinite(gradient.sum()))

        return watch

    def take_finite(self) -> Tensor:
        """Whether every gradient since the last call was finite, a bool tensor."""
        flags, self._flags = self._flags, []
        return torch.stack(flags).all() if flags else torch.tensor(True)

    def check_complete(self) -> None:
        """Raise RuntimeError if a trainable parameter has never had a gradient (a zero one counts): a silent cut in the graph."""
        if self._unseen:
            names = ", ".join(sorted(self._unseen)[:5])
            raise RuntimeError(f"{len(self._unseen)} trainable parameters got no gradient in the first step: {names}")
