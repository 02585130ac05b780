"""A refused start also ends torchrun. Otherwise it would restart the ranks up to --max-restarts
times, and each start would be refused.

One rank of each node sends SIGTERM to its ancestor, torchrun's agent: the first one that knows.

    all ranks agree on the error    each knows, after rank 0 has reported it
    the error is one rank's own     it leaves a note in the ranks' store; the others read it there
                                    when they lose their connections
    a spare (start/elastic.py)      reads it in place of `leave`

Without a restart left, torchrun ends by itself. A start that fails for any other reason, such as a
lost connection, is restarted.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch.distributed as dist

MODULES = {"torch.distributed.run", "torch.distributed.launch", "tools.torchrun"}
REFUSED = "refused"  # the note; and a file among the logs of a node's ranks in this start
STORE_SECONDS = 3.0  # for a call of the store, whose process may be dead


def end_torchrun(own: bool, has_spares: bool) -> None:
    """Stop torchrun's agent, if there is one, because this start is refused. The caller has
    reported the error, and exits with status 2.

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


def another_refused() -> bool:
    """Whether another rank has refused this start, which is why this one lost its connections."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not dist.is_initialized():
        return False
    found: list[bool] = []
    store = dist.distributed_c10d._get_default_store()
    _within(STORE_SECONDS, lambda: found.append(store.check([REFUSED])))
    return found == [True]


def stop_agent() -> None:
    """Send SIGTERM to torchrun's agent if it would restart this rank, unless another rank of this
    node has done so: torch's handler raises an exception, so a further signal would interrupt the
    agent while it stops its ranks."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    pid = find_agent() if restarts < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) else None
    if pid is None:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent passes it on to its ranks
    # …/attempt_N/LOCAL_RANK/error.json; slurm/train_70b.sh looks for …/attempt_N/refused
    logs = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    try:
        if logs.name == f"attempt_{restarts}":
            (logs / REFUSED).touch(exist_ok=False)
    except FileExistsError:
        return
    except OSError:
        pass  # a full disk, say: a further signal is better than none
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGTERM)


def find_agent() -> int | None:
    """The process id of torchrun's agent: this process's nearest ancestor that runs torchrun.
    Usually its parent; tools.torchrun has a fork server between. None if there is no such ancestor,
    or no /proc."""
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError):
        while pid > 1:
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
            return option == "-m" and word in MODULES
        if not word.startswith("-"):
            return Path(word).name == "torchrun"
    return False


def _leave_note() -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(REFUSED, "")
    # For spares, which see the store without this start's prefixes. Always: who is displaced
    # (checkpoint/lease.py) does not know whether there are any.
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    store.set("leave", REFUSED)


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Call `action`, which may fail or never return, in a thread, and wait so long for it."""

    def call() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
