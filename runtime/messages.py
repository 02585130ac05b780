"""Report each error once, from one rank, and exit with the matching status.

A UserError on any rank becomes one message from rank 0 on standard error, and exit status 2 on
every rank: the ranks synchronize at each `on_all_ranks`, so that no rank continues without the
others, and messages do not interleave. An error that ends a running run (`fail`) is reported once
too, as far as a rank can know what the others report.
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
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from errors import LOST, RunFailed, UserError
from runtime import torchrun
from runtime.output import log
from runtime.signals import Signals

# the source file and line that gloo puts before its messages
GLOO = re.compile(r"\[[^\]]*gloo/transport/[^\]]*\] ")
LAUNCHER_SECONDS = 3.0  # within which a launcher notices a dead rank and signals the others


class AgreedError(UserError):
    """A UserError that every rank raises, so that all ranks call `refuse` together."""


def this_rank() -> int:
    """The rank of this process, also where the process group is gone: between data stages."""
    if dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "").strip()  # perhaps what is refused
    return int(rank) if rank.isdecimal() and len(rank) <= 10 else 0


T = TypeVar("T")


def on_all_ranks(action: Callable[[], T], device: str) -> T:
    """Run `action` on every rank and return this rank's result. If any rank raises UserError, every
    rank raises the error of the lowest such rank, as an AgreedError. Without an error, this costs
    one all-reduce of one number."""
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


def refuse(error: UserError, has_spares: bool = False) -> NoReturn:
    """Report the error and exit with status 2. An AgreedError is reported by rank 0, and no rank
    exits before that. Any other error is this rank's own: it exits immediately, so that the
    launcher ends the other ranks instead of letting them wait. torchrun is stopped, too, because
    the next start would also be refused."""
    if not isinstance(error, AgreedError):
        log(f"error on rank {this_rank()}: {error}")
        torchrun.end_torchrun(True, has_spares)
        os._exit(2)  # not sys.exit: its clean-up would wait for the other ranks
    if this_rank() == 0:
        log(f"error: {error}")
    dist.barrier()  # if a rank exits first, torchrun may end rank 0 before it has reported
    torchrun.end_torchrun(False, has_spares)
    sys.exit(2)


class LostConnection(RuntimeError):
    """Another rank is dead or does not respond."""


def lost_connection(error: BaseException) -> bool:
    """Whether a rank failed only because another one did. Gloo's own errors are recognized by the
    name of its source file in front."""
    return isinstance(error, LostConnection | dist.DistNetworkError) or bool(
        GLOO.search(str(error))
    )


def describe(error: BaseException) -> str:
    """Describe in one line why a run failed. The error's note (next_stage.py,
    log/run_log.py) says how far it came."""
    when = getattr(error, "__notes__", ["while the run started"])[0]
    said = GLOO.sub("", " ".join(str(error).partition("\n")[0].split()))
    if lost_connection(error):
        return (
            f"{LOST} {when}; for the cause see the log of the rank that failed first "
            f"({said.partition('. ')[0]})"
        )
    if isinstance(error, RunFailed | UserError | SystemExit):
        return str(error)
    return f"{type(error).__name__} {when}: {said}"


def fail(error: Exception, signals: Signals, has_spares: bool = False) -> NoReturn:
    """End this process with status 1 after an error in the run.

    An error that all ranks raise (RunFailed) is reported by rank 0. A rank that only lost its
    connection to another gives the launcher time to end it, and then reports nothing. (If the other
    has refused the start, so does this rank.) Any other error is this rank's own and is reported
    with its traceback.
    """
    rank = this_rank()
    said = describe(error)
    asked = bool(signals.heard)
    signals.hush()
    if lost_connection(error):
        if torchrun.another_refused():
            torchrun.end_torchrun(False, has_spares)
            os._exit(2)
        patience = time.monotonic() + LAUNCHER_SECONDS
        while not (signals.heard or signals.abandoned) and time.monotonic() < patience:
            time.sleep(0.05)
        if asked and rank == 0:
            log(f"rank 0 exits after {signals.names()} without saving: {said}")
        elif not (signals.heard or signals.abandoned):
            _last_words(f"rank {rank}: {said}")
    elif isinstance(error, RunFailed):
        if rank == 0:
            _last_words(f"error: {said}")
        with contextlib.suppress(RuntimeError):
            dist.barrier()  # if a rank exits first, torchrun may end rank 0 before it has reported
    else:
        traceback.print_exception(error)
        _last_words(f"rank {rank} failed: {said}")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(1)  # not sys.exit: its clean-up would wait for the other ranks


def _last_words(text: str) -> None:
    """Log a final message, also to the file that torchrun repeats at the end of its report."""
    log(text)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(
                json.dumps({"message": {"message": text, "extraInfo": about}}), encoding="utf-8"
            )
