"""What one rank knows, known to all: an error, or what rank 0 has read."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from errors import UserError

T = TypeVar("T")


class AgreedError(UserError):
    """A UserError that every rank raises, so that all ranks call `refuse` (exit.py) together."""


def on_all_ranks(action: Callable[[], T], kind: type[Exception] = UserError) -> T:
    """Run `action` on every rank and return this rank's result. If any rank raises an error of
    `kind`, every rank raises that of the lowest such rank (a UserError as an AgreedError): no rank
    continues without the others. Without an error, this costs one all-reduce of one number, over
    gloo: `action` may read files for longer than NCCL waits."""
    error: Exception | None = None
    result = None
    try:
        result = action()
    except kind as caught:
        error = caught
    world = dist.get_world_size()
    speaker = torch.tensor(dist.get_rank() if error else world)
    dist.all_reduce(speaker, op=dist.ReduceOp.MIN)
    if speaker.item() == world:
        return result  # type: ignore[return-value]
    said = [error]
    dist.broadcast_object_list(said, src=int(speaker.item()))
    error = said[0]
    assert error is not None
    if isinstance(error, UserError):
        error = AgreedError(error.key, error.value, error.why, error.remedy)
    raise error


def from_rank_0(action: Callable[[], T], kind: type[Exception] = UserError) -> T:
    """Run `action` only on rank 0 and return its result on every rank, for example so that a shared
    folder is read once. `kind`: of errors that every rank raises."""
    results = [on_all_ranks(lambda: action() if dist.get_rank() == 0 else None, kind)]
    dist.broadcast_object_list(results, src=0)
    return results[0]  # type: ignore[return-value]
