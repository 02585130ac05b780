"""Your first parallel layer: an exercise for docs/tensor.md. Complete the three functions, then run
`.venv/bin/python -m pytest -x --tb=short docs/exercises/test_tensor.py`.

You need three calls of torch.distributed, which docs/mesh.md explains: `all_gather_into_tensor`,
`reduce_scatter_tensor` and `all_reduce`. A collective that not all ranks call is reported at once.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

S, D, F = 8, 4, 12  # sequence length, model dim, output dim


def shard_of_rows(weight: Tensor, tp_rank: int, tp: int) -> Tensor:
    """Return the rows [F/tp, D] of the whole weight [F, D] that rank `tp_rank` of `tp` ranks holds:
    the first rank the first rows, and so on."""
    raise NotImplementedError("yours to write")


def column_parallel_forward(
    x: Tensor, weight: Tensor, group: ProcessGroup, sequence_parallel: bool
) -> Tensor:
    """Compute this rank's outputs of y = x · weightᵀ.

    Args:
        x: with `sequence_parallel` this rank's part of the sequence [S/tp, D], otherwise all of it
            [S, D] on every rank.
        weight: this rank's rows, [F/tp, D].
        group: the tp ranks.
        sequence_parallel: whether x is sharded over the ranks along the sequence.

    Returns:
        y [S, F/tp]: all positions, this rank's outputs. One of the two cases needs no
            communication.
    """
    raise NotImplementedError("yours to write")


def column_parallel_backward(
    dy: Tensor, x: Tensor, weight: Tensor, group: ProcessGroup, sequence_parallel: bool
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the forward above; x and weight are as there, dy is [S, F/tp].

    Returns:
        dx, the complete gradient of x, with the shape of x; and dw [F/tp, D], the complete gradient
            of this rank's rows of the weight. Which of the two is only a partial sum before ranks
            communicate, and which collective makes it complete in each case?
    """
    raise NotImplementedError("yours to write")


class ColumnParallelLinear(nn.Module):
    """A linear layer whose output features are split over the ranks of `group`, made of your
    functions. Compare it with the one in parallel/tensor.py when you have finished."""

    def __init__(
        self, whole: Tensor, group: ProcessGroup, sequence_parallel: bool, functions: "Functions"
    ) -> None:
        super().__init__()
        shard, self.forward_of, self.backward_of = functions
        self.group, self.sequence_parallel = group, sequence_parallel
        self.weight = nn.Parameter(shard(whole, group.rank(), group.size()).clone())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Linear.apply(x, self.weight, self)
        return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: ColumnParallelLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return layer.forward_of(x, weight, layer.group, layer.sequence_parallel)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        layer = ctx.layer
        dx, dw = layer.backward_of(dy, *ctx.saved_tensors, layer.group, layer.sequence_parallel)
        return dx, dw, None


Functions = tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Any]]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_layer_equals_an_unsharded_one(ranks: Any, tp: int, sequence_parallel: bool) -> None:
    """Its output and both of its gradients, in float64."""
    numbers = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(shape, generator=numbers, dtype=torch.float64)
        for shape in ((S, D), (F, D), (S, F))
    )
    functions = (shard_of_rows, column_parallel_forward, column_parallel_backward)
    found = ranks.run(on_each_rank, tp, functions, sequence_parallel, x, w, dy)
    parts = tp if sequence_parallel else 1
    for rank, (y, dx, dw) in enumerate(found):
        torch.testing.assert_close(y, (x @ w.T).chunk(tp, dim=1)[rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dw, (dy.T @ x).chunk(tp)[rank], rtol=1e-12, atol=1e-12)
        mine = rank if sequence_parallel else 0
        torch.testing.assert_close(dx, (dy @ w).chunk(parts)[mine], rtol=1e-12, atol=1e-12)


def on_each_rank(
    functions: Functions, sequence_parallel: bool, x: Tensor, w: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rank, tp, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    layer = ColumnParallelLinear(w, group, sequence_parallel, functions)
    mine = (x.chunk(tp)[rank] if sequence_parallel else x).clone().requires_grad_()
    y = layer(mine)
    y.backward(dy.chunk(tp, dim=1)[rank].contiguous())
    assert mine.grad is not None
    assert layer.weight.grad is not None
    return y.detach(), mine.grad, layer.weight.grad
