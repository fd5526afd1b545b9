"""Collectives over a TP group that autograd can cross.  Each does nothing in a group of size 1."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megahedge.parallel.topology import TensorParallel


def all_reduce(tensor: Tensor, tensor_parallel: TensorParallel, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
    """A new tensor: `tensor` summed (or maximised …) over the group.  Without gradient."""
    if tensor_parallel.size == 1:
        return tensor
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if result.is_meta:  # shapes alone: nothing to sum, and no group
        return result
    dist.all_reduce(result, op=op, group=tensor_parallel.group)
    return result


def copy_to_tp(tensor: Tensor, tensor_parallel: TensorParallel) -> Tensor:
    """Forward: the tensor itself.  Backward: the gradient summed over the group.

    Stands where a replicated tensor enters computation that differs between the ranks.
    """
    return tensor if tensor_parallel.size == 1 else _CopyToTP.apply(tensor, tensor_parallel)


def reduce_from_tp(tensor: Tensor, tensor_parallel: TensorParallel) -> Tensor:
    """Forward: the sum over the group.  Backward: the gradient as it is, because what follows is the same on every rank."""
    return tensor if tensor_parallel.size == 1 else _ReduceFromTP.apply(tensor, tensor_parallel)


def copy_parameters_to_tp(*parameters: Tensor, tensor_parallel: TensorParallel) -> tuple[Tensor, ...]:
    """`copy_to_tp` for several small replicated parameters whose gradients are partial sums, in ONE all-reduce of the flattened gradients.

    Call it inside the forward of the module that owns them: ZeRO-3 holds a parameter only while its own module runs.
    """
    if tensor_parallel.size == 1 or not any(parameter.requires_grad for parameter in parameters):
        return parameters
    return _CopyParametersToTP.apply(tensor_parallel, *parameters)


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, tensor_parallel):
        ctx.tensor_parallel = tensor_parallel
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient, ctx.tensor_parallel), None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, tensor_parallel):
        return all_reduce(tensor, tensor_parallel)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _CopyParametersToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor_parallel, *parameters):
        ctx.tensor_parallel = tensor_parallel
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx, *gradients):
        # in fp32 at least: the vectors are small, and the ranks' parts may cancel
        wide = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]
        reduced = all_reduce(_flatten_dense_tensors(wide), ctx.tensor_parallel)
        parts = _unflatten_dense_tensors(reduced, wide)
        return None, *(part.to(gradient.dtype) for part, gradient in zip(parts, gradients, strict=True))
