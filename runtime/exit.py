"""How a rank exits when its start is refused or its run has failed: what it reports, and what it
tells torchrun and the other ranks. Each error is reported once, as far as a rank can know.

    error                            reported by           status
    UserError, agreed on             rank 0                2
    UserError of one rank            that rank             2
    RunFailed: all ranks raise it    rank 0                1; ends torchrun too
                                                           unless `restart_helps`
    the connection to another        this rank, if the     1; 2 if the other one has refused
    rank is lost                     launcher is not         this start
                                     ending it
    any other                        that rank, with its   1
                                     traceback

Status 2 also ends torchrun, which would otherwise restart the ranks up to --max-restarts times, and
each start would be refused. One rank of each node sends SIGTERM to its ancestor, torchrun's agent:
the first one that knows. Those that cannot know read a note in the ranks' store: spares
(start/elastic.py), and after one rank's own error the others, when they lose their connections.
Without a restart left, torchrun ends by itself; after any other status 1 it restarts the ranks.
"""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from errors import LOST, RunFailed, UserError
from runtime.agreement import AgreedError
from runtime.output import log
from runtime.signals import Signals

# the source file and line that gloo puts before its messages
GLOO = re.compile(r"\[[^\]]*gloo/transport/[^\]]*\] ")
# what NCCL says of a rank that died in a collective, and torch of one that died before its first
NCCL = re.compile("remote process exited|is setting up NCCL communicator")
LAUNCHER_SECONDS = 3.0  # within which a launcher notices a dead rank and signals the others
STORE_SECONDS = 3.0  # for a call of the store, whose process may be dead
TORCHRUN_MODULES = {"torch.distributed.run", "torch.distributed.launch", "tools.torchrun"}
REFUSED = "refused"  # the note; and a file among the logs of a node's ranks in this start
ENDED = "ended"  # the same, where another start may go on


def this_rank() -> int:
    """The rank of this process, also where the process group is gone: between data stages."""
    if dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "").strip()  # perhaps what is refused
    return int(rank) if rank.isdecimal() and len(rank) <= 10 else 0


# --- a refused start, status 2 --------------------------------------------------------------------


def refuse(error: UserError, has_spares: bool = False) -> NoReturn:
    """Report the error and exit. All ranks call it together with an AgreedError, and none exits
    before rank 0 has reported it. Any other error is this rank's own: it exits immediately, so that
    the launcher ends the other ranks instead of letting them wait."""
    if not isinstance(error, AgreedError):
        log(f"error on rank {this_rank()}: {error}")
        _end_torchrun(True, has_spares)
        os._exit(2)  # not sys.exit: its clean-up would wait for the other ranks
    if this_rank() == 0:
        log(f"error: {error}")
    dist.barrier()  # if a rank exits first, torchrun may end rank 0 before it has reported
    _end_torchrun(False, has_spares)
    sys.exit(2)


def _end_torchrun(own: bool, has_spares: bool) -> None:
    """Stop torchrun's agent, if there is one, and let all that must know read why.

    Args:
        own: whether only this rank knows the error.
        has_spares: whether ranks wait that do not train.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    is_first, has_readers = os.environ["RANK"] == "0", own or has_spares
    if own or (is_first and has_readers):
        _within(STORE_SECONDS, _leave_note)
    stop_agent()
    if is_first and has_readers:  # this process may hold the store: they must be able to read it
        if own:  # which the others do when they have lost their connections
            _within(STORE_SECONDS, dist.distributed_c10d._abort_process_group)
        time.sleep(STORE_SECONDS)


def _leave_note() -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(REFUSED, "")
    # For spares, which see the store without this start's prefixes. Always: who is displaced
    # (checkpoint/lease.py) does not know whether there are any.
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    store.set("leave", REFUSED)


def _another_refused() -> bool:
    """Whether another rank has refused this start, which is why this one lost its connections."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not dist.is_initialized():
        return False
    found: list[bool] = []
    store = dist.distributed_c10d._get_default_store()
    _within(STORE_SECONDS, lambda: found.append(store.check([REFUSED])))
    return found == [True]


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Call `action`, which may fail or never return, in a thread, and wait so long for it."""

    def call() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


# --- torchrun's agent -----------------------------------------------------------------------------


def stop_agent(mark: str = REFUSED) -> None:
    """Leave the file `mark` among the logs of this node's ranks (slurm/train_70b.sh looks for it),
    and send SIGTERM to torchrun's agent if it would restart this rank. The rank that leaves the
    file does it: torch's handler raises an exception, so a further signal would interrupt the agent
    while it stops its ranks."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    pid = None
    if restarts < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        if (pid := find_agent()) is None:
            return  # torchrun starts the ranks again: this start is not the last
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent passes it on to its ranks
    # …/attempt_N/LOCAL_RANK/error.json
    logs = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    try:
        if logs.name == f"attempt_{restarts}":
            (logs / mark).touch(exist_ok=False)
    except FileExistsError:
        return
    except OSError:
        pass  # a full disk, say: a further signal is better than none
    if pid is not None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)


def find_agent() -> int | None:
    """The process id of torchrun's agent: this process's nearest ancestor that runs torchrun.
    Usually its parent; tools.torchrun has a fork server between. None if there is no such ancestor,
    or no /proc."""
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError):
        while pid > 0:  # 1: in a container, torchrun itself
            if runs_torchrun(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")):
                return pid
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def runs_torchrun(command: list[str]) -> bool:
    """Whether a process with these arguments is Python that runs torchrun: not a shell, `srun` or
    `timeout` that starts it."""
    if not Path(command[0]).name.startswith("python"):
        return False
    for option, word in pairwise(command):
        if option in ("-m", "-c"):
            return option == "-m" and word in TORCHRUN_MODULES
        if not word.startswith("-") and option not in ("-W", "-X"):  # whose values they are
            return Path(word).name == "torchrun"
    return False


# --- a failed run, status 1 -----------------------------------------------------------------------


class LostConnection(RuntimeError):
    """Another rank is dead or does not respond."""


def lost_connection(error: BaseException) -> bool:
    """Whether a rank failed only because another one did. Gloo's own errors are recognized by the
    name of its source file in front, NCCL's by their words."""
    return isinstance(error, LostConnection | dist.DistNetworkError) or any(
        of_library.search(str(error)) for of_library in (GLOO, NCCL)
    )


def describe(error: BaseException) -> str:
    """Describe in one line why a run failed. The error's note (all_listeners.py, log/run_log.py)
    says how far it came."""
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
    """Report an error that is not the user's, and end this process. A rank that only lost its
    connection first gives the launcher time to end it."""
    rank = this_rank()
    said = describe(error)
    asked = bool(signals.heard)
    signals.hush()
    if lost_connection(error):
        if _another_refused():
            _end_torchrun(False, has_spares)
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
        if not error.restart_helps:
            stop_agent(ENDED)  # a job then begins anew, and chooses its nodes
    else:
        traceback.print_exception(error)
        _last_words(f"rank {rank} failed: {said}")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(1)  # not sys.exit: its clean-up would wait for the other ranks


def _last_words(text: str) -> None:
    """Log a final message, also to the file that torchrun repeats at the end of its report. (Its
    own ErrorHandler would write a traceback instead.)"""
    log(text)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"py_callstack": text, "timestamp": str(int(time.time()))}
        message = json.dumps({"message": {"message": text, "extraInfo": about}})
        with contextlib.suppress(OSError):
            Path(path).write_text(message, encoding="utf-8")
