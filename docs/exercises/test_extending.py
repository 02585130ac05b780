"""Two exercises for docs/extending.md: complete the functions, then run `.venv/bin/python -m
pytest docs/exercises/test_extending.py`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.pipeline.actions import FORWARD, Action, Fault
from parallel.pipeline.check import check
from parallel.pipeline.schedules import build_schedule


def trust_ratio(weight: Tensor, update: Tensor, group: ProcessGroup) -> Tensor:
    """‖weight‖ / ‖update‖ of a whole matrix, by which LAMB scales its step (You et al. 2019,
    https://arxiv.org/abs/1904.00962). Each rank of `group` holds some rows of both. Returns a
    scalar, the same on every rank; 1 if either norm is 0.

    AdamW is elementwise, so each rank can update its shard without communication. This factor is
    not: what must be communicated, and how often?
    """
    raise NotImplementedError("yours to write")


def break_it(schedule: list[list[Action]]) -> list[list[Action]]:
    """Return the same actions of each rank in another order, in which ranks wait for each other
    forever, so that `check` raises Fault.

    A checker that accepts everything would prove nothing.
    """
    raise NotImplementedError("yours to write")


def test_the_ratio_is_the_whole_matrixs(ranks: Any) -> None:
    numbers = torch.Generator().manual_seed(0)
    weight, update = (torch.randn((6, 4), generator=numbers, dtype=torch.float64) for _ in range(2))
    update[:3] *= 10  # so that the two ranks' local ratios differ
    ratio = weight.norm() / update.norm()
    for found in ranks.run(on_each_rank, 2, trust_ratio, weight, update):
        torch.testing.assert_close(found, ratio)
    for found in ranks.run(on_each_rank, 2, trust_ratio, weight, update * 0):
        assert found == 1


def test_the_checker_complains() -> None:
    schedule = build_schedule("1f1b", 4, 1, 8)
    check(schedule)
    broken = break_it([list(actions) for actions in schedule])
    assert [sorted(map(str, actions)) for actions in broken] == [
        sorted(map(str, actions)) for actions in schedule
    ]
    assert [actions[0].kind for actions in broken] == [FORWARD] * 4
    with pytest.raises(Fault):
        check(broken)


def on_each_rank(ratio: Any, weight: Tensor, update: Tensor) -> Tensor:
    rank = dist.get_rank()
    return ratio(weight.chunk(2)[rank], update.chunk(2)[rank], dist.group.WORLD)
