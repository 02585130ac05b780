"""An exercise: complete the function, then `.venv/bin/python -m pytest
docs/exercises/test_tensor.py`. Page: docs/tensor.md"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

T, D, F = 6, 4, 8


def column_parallel_backward(
    dy: Tensor, x: Tensor, weight: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """The backward of y = x · weightᵀ on one tp rank of `group`, without sequence parallelism.

    Forward moved nothing: x [T, D] is whole on every rank, `weight` [F/tp, D] are this rank's rows,
    and y and dy are [T, F/tp].

    Returns:
        dx [T, D], the gradient of x, whole and the same on every rank; and this rank's dw [F/tp,
            D].
        One call of torch.distributed is needed. For which of the two, and why not for the other?
    """
    raise NotImplementedError("yours to write")


def test_it_gives_the_gradients_of_the_whole_product(ranks: Any) -> None:
    numbers = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(shape, generator=numbers, dtype=torch.float64)
        for shape in ((T, D), (F, D), (T, F))
    )
    found = ranks.run(on_each_rank, 2, column_parallel_backward, x, w, dy)
    for rank, (dx, dw) in enumerate(found):
        torch.testing.assert_close(dx, dy @ w, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dw, (dy.T @ x).chunk(2)[rank], rtol=1e-12, atol=1e-12)


def on_each_rank(
    backward: Callable[..., tuple[Tensor, Tensor]], x: Tensor, w: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    return backward(
        dy.chunk(2, dim=1)[rank].contiguous(), x, w.chunk(2)[rank].contiguous(), dist.group.WORLD
    )
