"""The collectives of tensor parallelism, and the autograd operations built from them.

Every function takes the process group that it communicates over. A collective over one rank returns
its input, so callers need no special case for an axis of size 1. The sequence is the *first*
dimension of activations, [S, B, …], because collectives concatenate and split along the first
dimension: a gathered sequence is then contiguous without a copy.

A tensor that autograd may still share is never reduced in place: when a gradient flows into two
branches, both receive the same tensor.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """The result of a collective that may still be running. Operations issued after `wait()` run
    after the collective."""

    def __init__(self, tensor: Tensor, work: Any) -> None:
        self._tensor, self._work = tensor, work

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._tensor


def start_all_gather(x: Tensor, group: ProcessGroup) -> Pending:
    """Start to gather [S/n, …] from each of n ranks into [S, …] on all, in rank order."""
    n = group.size()
    if n == 1:
        return Pending(x, None)
    out = x.new_empty((n * x.shape[0], *x.shape[1:]))
    return Pending(out, _all_gather_single(out, x.contiguous(), group=group, async_op=True))


def start_reduce_scatter(x: Tensor, group: ProcessGroup) -> Pending:
    """Start to sum [S, …] over n ranks; each receives its slice [S/n, …] of the sum. `x` must not
    be modified before `wait()`."""
    n = group.size()
    if n == 1:
        return Pending(x, None)
    out = x.new_empty((x.shape[0] // n, *x.shape[1:]))
    return Pending(out, _reduce_scatter_single(out, x.contiguous(), group=group, async_op=True))


def start_all_reduce_(x: Tensor, group: ProcessGroup) -> Pending:
    """Start to sum `x` over the group in place: only for a tensor that the caller has just made."""
    if group.size() == 1:
        return Pending(x, None)
    return Pending(x, dist.all_reduce(x, group=group, async_op=True))


def all_reduce(x: Tensor, group: ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum (or `op`) of `x` over the group, in a new tensor."""
    if group.size() == 1:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=op, group=group)
    return out


class ReduceFromTensorParallel(torch.autograd.Function):
    """Megatron's g: all-reduce partial sums (Shoeybi et al. 2019, section 3).

    | pass     | computes       | local shapes          | communication            |
    |----------|----------------|-----------------------|--------------------------|
    | forward  | y = Σ_ranks x  | [S, B, D] → the same  | all-reduce S·B·D over tp |
    | backward | dx = dy        | [S, B, D] → the same  | none                     |
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class ReduceScatterToSequence(torch.autograd.Function):
    """g-bar of Korthikanti et al. (2022, section 4.2.2): reduce-scatter partial sums, so that each
    rank has the sum for its part of the sequence.

    | pass     | computes                  | local shapes              | communication over tp |
    |----------|---------------------------|---------------------------|-----------------------|
    | forward  | y = (Σ_ranks x)[my slice] | [S, B, D] → [S/tp, B, D]  | reduce-scatter S·B·D  |
    | backward | dx = concatenated dy      | [S/tp, B, D] → [S, B, D]  | all-gather S·B·D      |
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return start_reduce_scatter(x, group).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return start_all_gather(dy, ctx.group).wait(), None


def reduce_over_tp(partial: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Sum [S, B, D] over tp: to [S/tp, B, D] with sequence parallelism, else to [S, B, D]."""
    if group.size() == 1:
        return partial  # no autograd function: its output would be a view, and FSDP warns of those
    reduce = ReduceScatterToSequence if sequence_parallel else ReduceFromTensorParallel
    return reduce.apply(partial, group)
