"""Two exercises for docs/tensor.md: complete the functions, then run `.venv/bin/python -m pytest
docs/exercises/test_sequence.py`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

S, D = 6, 4


def leave_backward(dy: Tensor, group: ProcessGroup) -> Tensor:
    """Compute the backward of a reduce-scatter. In forward, each of the tp ranks had a partial sum
    x [S, D], and the reduce-scatter gave each rank y [S/tp, D], its rows of Σ x.

    Given dy [S/tp, D], return dx [S, D]. The y of every rank depends on this rank's x. How often is
    each number of x used?
    """
    raise NotImplementedError("yours to write")


def norm_weight_gradient(
    dy: Tensor, normed: Tensor, group: ProcessGroup, sequence_parallel: bool
) -> Tensor:
    """Compute the gradient of a norm's weight w [D], where y = normed · w.

    With sequence parallelism, dy and normed are this rank's rows, [S/tp, D]. Without it, both have
    all rows, [S, D], and are the same on every rank. In both cases every rank must return the same
    gradient, over all S rows, each counted once.
    """
    raise NotImplementedError("yours to write")


def test_leaving(ranks: Any) -> None:
    numbers = torch.Generator().manual_seed(1)
    dy = torch.randn((S, D), generator=numbers, dtype=torch.float64)
    for dx in ranks.run(leave, 2, leave_backward, dy):
        torch.testing.assert_close(dx, dy, rtol=0, atol=0)


def test_the_norms_gradient(ranks: Any) -> None:
    numbers = torch.Generator().manual_seed(2)
    dy, normed = (torch.randn((S, D), generator=numbers, dtype=torch.float64) for _ in range(2))
    for found in ranks.run(norms, 2, norm_weight_gradient, dy, normed):
        for gradient in found:
            torch.testing.assert_close(gradient, (dy * normed).sum(0), rtol=1e-12, atol=1e-12)


def leave(backward: Callable[..., Tensor], dy: Tensor) -> Tensor:
    return backward(dy.chunk(2)[dist.get_rank()].contiguous(), dist.group.WORLD)


def norms(gradient: Callable[..., Tensor], dy: Tensor, normed: Tensor) -> tuple[Tensor, Tensor]:
    rank, group = dist.get_rank(), dist.group.WORLD
    with_parts = gradient(
        dy.chunk(2)[rank].contiguous(), normed.chunk(2)[rank].contiguous(), group, True
    )
    return with_parts, gradient(dy, normed, group, False)
