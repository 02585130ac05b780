"""What one rank knows, known to all: an error of the user, or what rank 0 has read."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from errors import UserError

T = TypeVar("T")


class AgreedError(UserError):
    """A UserError that every rank raises, so that all ranks call `refuse` (exit.py) together."""


def on_all_ranks(action: Callable[[], T], device: str) -> T:
    """Run `action` on every rank and return this rank's result. If any rank raises UserError, every
    rank raises the error of the lowest such rank, as an AgreedError: no rank continues without the
    others. Without an error, this costs one all-reduce of one number."""
    error: UserError | None = None
    result = None
    try:
        result = action()
    except UserError as caught:
        error = caught
    world = dist.get_world_size()
    speaker = torch.tensor(dist.get_rank() if error else world, device=device)
    dist.all_reduce(speaker, op=dist.ReduceOp.MIN)
    if speaker.item() == world:
        return result  # type: ignore[return-value]
    said = [(error.key, error.value, error.why, error.remedy) if error else None]
    dist.broadcast_object_list(said, src=int(speaker.item()))
    assert said[0] is not None
    raise AgreedError(*said[0])


def from_rank_0(action: Callable[[], T], device: str) -> T:
    """Run `action` only on rank 0 and return its result on every rank, for example so that a shared
    folder is read once."""
    results = [on_all_ranks(lambda: action() if dist.get_rank() == 0 else None, device)]
    dist.broadcast_object_list(results, src=0)
    return results[0]  # type: ignore[return-value]
