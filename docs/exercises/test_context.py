"""Two exercises for docs/context.md: complete the functions, then run `.venv/bin/python -m pytest
docs/exercises/test_context.py`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.context import ContextParallel

S, WIDTH = 16, 3


def keys_that_are_needed(chunk: range, begins: list[int]) -> range:
    """Return the positions of the keys that the queries of `chunk` see, as one range.

    begins: where each document of the sequence begins, ascending; the first is 0. A token sees
    itself and the tokens of its own document before it. Several documents may lie in the chunk, and
    the first of them may have begun before it.
    """
    raise NotImplementedError("yours to write")


def gradient_of_my_keys(dk: Tensor, group: ProcessGroup) -> Tensor:
    """Compute the backward of the gather of keys, for one of the cp ranks of `group`.

    dk: [S, WIDTH], in the order of the sequence: the gradients of all keys, of which this rank has
    only what its own queries contribute. Returns [S/cp, WIDTH], the whole gradients of the keys
    that this rank holds: chunk r, then chunk 2 cp − 1 − r. Each rank should receive only these.
    """
    raise NotImplementedError("yours to write")


@pytest.mark.parametrize("begins", [[0], [0, 5, 6, 11], [0, 4, 8, 12], list(range(S))])
def test_the_keys_of_a_chunk(begins: list[int]) -> None:
    begin_of = [max(begin for begin in begins if begin <= at) for at in range(S)]
    for first in range(S):
        for end in range(first + 1, S + 1):
            seen = {key for at in range(first, end) for key in range(begin_of[at], at + 1)}
            found = keys_that_are_needed(range(first, end), begins)
            assert sorted(seen) == list(found)


@pytest.mark.parametrize("cp", [2, 4])
def test_the_gradient_of_keys(ranks: Any, cp: int) -> None:
    numbers = torch.Generator().manual_seed(1)
    dk = torch.randn((cp, S, WIDTH), generator=numbers, dtype=torch.float64)
    found = ranks.run(backward, cp, gradient_of_my_keys, dk)
    for rank, gradient in enumerate(found):
        mine = ContextParallel(cp, rank).cut(dk.sum(0), 0)
        torch.testing.assert_close(gradient, mine, rtol=1e-12, atol=1e-12)


def backward(gradient: Callable[..., Tensor], dk: Tensor) -> Tensor:
    rank = dist.get_rank()
    return gradient(dk[rank], dist.group.WORLD)
