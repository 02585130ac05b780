"""The collectives of tensor, context and expert parallelism.

Each takes the process group that it communicates over, and over one rank (`ONE_RANK`) returns its
input: `wait()` needs no special case there; `pieces()` and `out` do.

The sequence is the *first* dimension of activations, [S, B, …], because collectives concatenate and
split along the first dimension: a gathered sequence is then contiguous without a copy.

With sequence parallelism the sequence is cut into *pieces*, and rank r holds part r of each piece:

    S = 16, 2 ranks    1 piece     rank 0 holds 0–7          rank 1 holds 8–15
                       2 pieces    rank 0 holds 0–3, 8–11    rank 1 holds 4–7, 12–15

So an all-gather of the ranks' i-th parts is piece i, and a reduce-scatter of piece i leaves each
rank its i-th part: contiguous slices on both sides, so nothing is copied or reordered. A gather or
scatter of the sequence is one collective for each piece, and a product of one piece runs while
other pieces are sent. `by_rank` states which positions a rank holds.

A tensor that autograd may still share is never reduced in place: when a gradient flows into two
branches, both receive the same tensor.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """The result of collectives that may still be running, one for each piece. Operations issued
    after a wait run after the collectives that it waits for."""

    def __init__(self, tensor: Tensor, works: Sequence[Any] = ()) -> None:
        self._tensor, self._works = tensor, list(works)

    def wait(self) -> Tensor:
        """The whole result."""
        for work in self._works:
            work.wait()
        self._works = []
        return self._tensor

    def pieces(self) -> Iterator[Tensor]:
        """Each piece of the result, as soon as its collective has ended."""
        for piece in self._tensor.chunk(len(self._works)):
            self._works.pop(0).wait()
            yield piece


ONE_RANK = ProcessGroup(0, 1)  # type: ignore[call-arg]  # a group over which nothing is sent


def by_rank(x: Tensor, ranks: int, pieces: int) -> Tensor:
    """Map [S, …], in the order of the sequence, to [ranks, S/ranks, …]: what each rank holds, in
    the order in which it holds it."""
    return x.unflatten(0, (pieces, ranks, -1)).transpose(0, 1).flatten(1, 2)


def start_all_gather(x: Tensor, group: ProcessGroup, pieces: int = 1) -> Pending:
    """Start to gather [S/n, …] from each of n ranks into [S, …] on all. With one piece the ranks'
    parts follow each other in rank order; else those of each piece do."""
    n = group.size()
    if n == 1:
        return Pending(x)
    out = x.new_empty((n * x.shape[0], *x.shape[1:]))
    parts = zip(out.chunk(pieces), x.contiguous().chunk(pieces), strict=True)
    return Pending(
        out, [_all_gather_single(whole, mine, group=group, async_op=True) for whole, mine in parts]
    )


def start_reduce_scatter(
    x: Tensor, group: ProcessGroup, pieces: int = 1, out: Tensor | None = None
) -> Pending:
    """Start to sum [S, …] over n ranks; each receives its part [S/n, …] of every piece of the sum,
    in `out` if given. `x` must not be modified before `wait()`."""
    n = group.size()
    if n == 1:
        return Pending(x)
    if out is None:
        out = x.new_empty((x.shape[0] // n, *x.shape[1:]))
    parts = zip(out.chunk(pieces), x.contiguous().chunk(pieces), strict=True)
    return Pending(
        out,
        [_reduce_scatter_single(mine, whole, group=group, async_op=True) for mine, whole in parts],
    )


def start_all_to_all(
    x: Tensor, group: ProcessGroup, send: Sequence[int], receive: Sequence[int]
) -> Pending:
    """Start to send `send[r]` rows of x [rows, …], in order, to each rank r, and to receive
    `receive[r]` from it → [sum of receive, …], in rank order. `x` must not be modified before
    `wait()`."""
    if group.size() == 1:
        return Pending(x)
    out, splits = x.new_empty((sum(receive), *x.shape[1:])), (list(receive), list(send))
    work = dist.all_to_all_single(out, x.contiguous(), *splits, group=group, async_op=True)
    return Pending(out, [work])


def start_reduce_(
    x: Tensor,
    group: ProcessGroup,
    sequence_parallel: bool,
    pieces: int = 1,
    out: Tensor | None = None,
) -> Pending:
    """Start to sum `x`, which the caller has just made, as the residual stream is split: with
    sequence parallelism by a reduce-scatter, else by an all-reduce in place."""
    if sequence_parallel:
        return start_reduce_scatter(x, group, pieces, out)
    if group.size() == 1:
        return Pending(x)
    return Pending(x, [dist.all_reduce(x, group=group, async_op=True)])


def all_reduce(x: Tensor, group: ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum (or `op`) of `x` over the group, in a new tensor if there are several ranks."""
    if group.size() == 1:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, op=op, group=group)
    return out
