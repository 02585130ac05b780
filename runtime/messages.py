"""Messages: one message for an error, from one rank, and the exit status that goes with it.

A UserError on any rank becomes one message, from rank 0, on standard error, and exit status 2 on
every rank: all ranks wait for each other at each `on_all_ranks`, so that no rank continues by
itself, and messages do not interleave. What ends a run that had begun (`fail`) is one message too,
as far as a rank can know what the others say.
"""

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO, TypeVar

import torch
import torch.distributed as dist

from errors import RunFailed, UserError
from runtime.signals import Signals

# its source file and line, before what it says
GLOO = re.compile(r"\[[^\]]*gloo/transport/[^\]]*\] ")
LOST = "lost connection to another rank"
LAUNCHER_SECONDS = 3.0  # in which a launcher notices that a rank has died, and tells the others


def log(text: str, file: TextIO | None = None) -> None:
    """A line on standard error, or on `file`. Where even that cannot be written (a log may lie on
    the disk that is full), the run goes on without."""
    with contextlib.suppress(OSError):
        print(text, file=file or sys.stderr, flush=True)


class AgreedError(UserError):
    """A UserError that every rank raises alike, so that all of them meet in `refuse`."""


T = TypeVar("T")


def on_all_ranks(action: Callable[[], T], device: str) -> T:
    """Run `action` on every rank and return each rank's result; if any rank raises UserError, every
    rank raises that of the lowest such rank, as an AgreedError. One all-reduce of one number when
    all is well."""
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
    """Run `action` on rank 0 alone and give its result to every rank: what is read from a shared
    folder is read once."""
    results = [on_all_ranks(lambda: action() if dist.get_rank() == 0 else None, device)]
    dist.broadcast_object_list(results, src=0)
    return results[0]  # type: ignore[return-value]


def refuse(error: UserError) -> NoReturn:
    """Say it and leave with status 2: what all ranks agreed on, once, and nobody leaves before it
    is said; what one rank met alone, in the middle of the run, at once, so that the launcher ends
    the others instead of letting them wait for it."""
    if not isinstance(error, AgreedError):
        log(f"error on rank {dist.get_rank()}: {error}")
        os._exit(2)  # not sys.exit: its clean-up would wait for the other ranks
    if dist.get_rank() == 0:
        log(f"error: {error}")
    dist.barrier()  # a rank that left early would make torchrun end rank 0 in mid-sentence
    sys.exit(2)


class LostConnection(RuntimeError):
    """Another rank is dead, or no longer answers."""


def lost_connection(error: BaseException) -> bool:
    """Whether a rank failed only because another one did. gloo says so in its own words, behind its
    own file's name."""
    return isinstance(error, LostConnection | dist.DistNetworkError) or bool(
        GLOO.search(str(error))
    )


def describe(error: BaseException) -> str:
    """Why a run failed, in one line. How far it came is in the error's note (metrics.py)."""
    when = getattr(error, "__notes__", ["while the run started"])[0]
    said = GLOO.sub("", " ".join(str(error).partition("\n")[0].split()))
    if lost_connection(error):
        return (
            f"{LOST} {when}; the log of the first rank that failed says why "
            f"({said.partition('. ')[0]})"
        )
    if isinstance(error, RunFailed | UserError):
        return str(error)
    return f"{type(error).__name__} {when}: {said}"


def fail(error: Exception, signals: Signals) -> NoReturn:
    """End this process after an error in the run, with status 1. Of what all ranks know, rank 0
    speaks; a rank that only lost another gives the launcher time to end it, and is silent then; any
    other error is this rank's own, with its traceback."""
    rank = dist.get_rank()
    said = describe(error)
    asked = bool(signals.heard)
    signals.hush()
    if lost_connection(error):
        patience = time.monotonic() + LAUNCHER_SECONDS
        while not (signals.heard or signals.abandoned) and time.monotonic() < patience:
            time.sleep(0.05)
        if asked and rank == 0:
            log(f"rank 0 leaves after {signals.names()}, and nothing is saved: {said}")
        elif not (signals.heard or signals.abandoned):
            _last_words(f"rank {rank}: {said}")
    elif isinstance(error, RunFailed):
        if rank == 0:
            _last_words(f"error: {said}")
        with contextlib.suppress(RuntimeError):
            dist.barrier()  # a rank that left early would make torchrun end rank 0 in mid-sentence
    else:
        traceback.print_exception(error)
        _last_words(f"rank {rank} failed: {said}")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(1)  # not sys.exit: its clean-up would wait for the other ranks


def _last_words(text: str) -> None:
    """Say them; torchrun repeats at the end of its report what it finds in this file."""
    log(text)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(
                json.dumps({"message": {"message": text, "extraInfo": about}}), encoding="utf-8"
            )
