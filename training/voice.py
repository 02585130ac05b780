"""Refusing and ending a run with one voice.

A UserError on any rank becomes one message, from rank 0, on standard error, and exit status 2 on every rank: all ranks meet at
each `together`, so none goes on alone and none prints over another.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn, TextIO, TypeVar

import torch
import torch.distributed as dist

from errors import UserError


def say(text: str, file: TextIO | None = None) -> None:
    """A line on standard error, or on `file`. Where even that cannot be written (a log may lie on the disk that is full), the
    run goes on without."""
    with contextlib.suppress(OSError):
        print(text, file=file or sys.stderr, flush=True)


class AgreedError(UserError):
    """A UserError that every rank raises alike, so that all of them meet in `refuse`."""


T = TypeVar("T")


def together(action: Callable[[], T], device: str) -> T:
    """Run `action` on every rank and return each rank's result; if any rank raises UserError, every rank raises that of the
    lowest such rank, as an AgreedError. One all-reduce of one number when all is well."""
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
    """Run `action` on rank 0 alone and give its result to every rank: what is read from a shared folder is read once."""
    results = [together(lambda: action() if dist.get_rank() == 0 else None, device)]
    dist.broadcast_object_list(results, src=0)
    return results[0]  # type: ignore[return-value]


def refuse(error: UserError) -> NoReturn:
    """Say it and leave with status 2: what all ranks agreed on, once, and nobody leaves before it is said; what one rank met
    alone, in the middle of the run, at once, so that the launcher ends the others instead of letting them wait for it."""
    if not isinstance(error, AgreedError):
        print(f"error on rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # not sys.exit: its clean-up would wait for the other ranks
    if dist.get_rank() == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    dist.barrier()  # a rank that left early would make torchrun end rank 0 in mid-sentence
    sys.exit(2)
