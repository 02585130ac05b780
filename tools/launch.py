"""Starts a run on this machine; `make train` calls it.

    python -m tools.launch [--nproc-per-node N] CONFIG [section.key=value …]

With --nproc-per-node: N processes, laid out as the file and the overrides say, as torchrun would
start them. Without it, on what there is. Without a GPU: 8 processes over gloo, one thread each,
laid out as the file says. With GPUs: one process for each of as many as are a power of two, at most
8, over NCCL, in bfloat16, with the axes as large as they allow; overrides that you give come last,
so they win.

    launcher  imports ─┬ fork … fork ─┬─ waits ──────┬─ removes the store, ends with the first
    rank r             └── joins, trains: train.main ┘  failure's status

The ranks share the memory of what is imported, and the time that it took. They find each other in a
file, in a folder that only this user may enter: no port is opened but those of gloo and NCCL, on
the loopback interface. (Who reaches torchrun's port can run code as you: README, "More GPUs, more
machines".)

A signal that asks for a stop is passed to every rank, once; a second request ends all at once. The
ranks are a process group of their own, so that Ctrl-C reaches them no other way. Exit status: 0;
the first failure's; 2 where the configuration is refused; 128 + the signal's number where one ended
the run.
"""

from runtime import signals

if __name__ == "__main__":  # first of all: the other imports take seconds
    signals.leave_on_request()

import argparse
import contextlib
import ctypes
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch._dynamo  # imported when the first DTensor is used; here once, for all ranks
import torch.distributed as dist

import train
from errors import UserError
from runtime.messages import log
from runtime.signals import Signals
from runtime.status import read_status, record_failure
from training.load_config import load_config

# the smallest world in which tensor, pipeline and data parallelism all have two ranks
MAX_PROCESSES = 8
PROCESSES_PER_CORE = 32  # at most, without GPUs: each takes 0.3 GB
# after a failure, until the others are told to leave: they notice, and rank 0 writes it down
NOTICE_SECONDS = 2.0
KILL_SECONDS = 15.0  # after that, until they are killed
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h


def layout(num_gpus: int) -> tuple[int, list[str]]:
    """How many processes to start, and the overrides that fit the configuration to them.

    GPUs are used in powers of two, which divide the batch and the heads; the doublings go to tp,
    then pp, then dp_shard.
    """
    if num_gpus == 0:
        return MAX_PROCESSES, []
    processes = 1 << (min(num_gpus, MAX_PROCESSES).bit_length() - 1)
    tp = min(processes, 2)
    pp = min(processes // tp, 2)
    axes = [f"parallel.tp={tp}", f"parallel.pp={pp}", "parallel.dp_shard=-1"]
    return processes, [*axes, "train.dtype=bfloat16"]


def count_gpus() -> int:
    """Asked in a process of its own: one that has spoken to the driver cannot be forked."""
    pid = os.fork()
    if pid == 0:
        os._exit(torch.cuda.device_count())
    return max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def check_processes(processes: int, gpus: int) -> None:
    """Raises UserError for more than this machine has room for."""
    most = gpus or PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if not 1 <= processes <= most:
        why = (
            f"this machine has {gpus} GPUs" if gpus else f"this machine has {os.cpu_count()} cores"
        )
        raise UserError("--nproc-per-node", processes, why, f"give 1 to {most}")


# --- a rank ---------------------------------------------------------------------------------------


def run_rank(store: dist.Store, heard: Signals, arguments: list[str]) -> None:
    """A rank's life, as train.py begins it."""
    train.main(arguments, heard, store)


def _become_rank(
    rank: int,
    processes: int,
    store: Path,
    group: int,
    function: Callable[..., None],
    arguments: tuple,
) -> None:
    """In the forked process, which does not return from here."""
    status = 1
    try:
        os.setpgid(0, group)
        heard = Signals(speaks=rank == 0).listen()
        _end_with(os.getppid())
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(processes)})
        os.environ.update({"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)})
        function(dist.FileStore(str(store), processes), heard, *arguments)
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # what is above on the stack is the launcher's


def _end_with(launcher: int) -> None:
    """Ask this process to stop when the launcher is killed (Linux only): by another signal than who
    killed it may have sent before, for a second one of the same means at once."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
        if os.getppid() != launcher:  # it was killed before
            os.kill(os.getpid(), signal.SIGUSR1)


# --- the launcher ---------------------------------------------------------------------------------


@dataclass
class Ending:
    """How the ranks ended."""

    failure: tuple[int, int] | None = None  # the first: rank, exit status, or -signal
    received: list[int] = field(default_factory=list)  # signals that asked for a stop, in order
    at_once: bool = False  # as the second of them demanded

    def why(self) -> str:
        if self.at_once:
            return f"{signal.Signals(self.received[0]).name} was received twice"
        assert self.failure is not None
        rank, status = self.failure
        if status < 0:
            return f"rank {rank} was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"rank {rank} ended with status {status}"

    def status(self) -> int:
        if self.failure is not None and not self.at_once:
            return self.failure[1] if self.failure[1] > 0 else 1
        return 128 + self.received[0] if self.received else 0


def start_processes(processes: int, function: Callable[..., None], *arguments: object) -> Ending:
    """`function(store, signals, *arguments)` as ranks of one world here, until all have ended."""
    awaited = {*signals.requests(), signal.SIGCHLD, signal.SIGALRM}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    # the default, to ignore it, would hide it from sigwait on macOS
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"lattice-{os.getpid()}-"))  # mode 0700
    try:
        gc.collect()
        gc.freeze()  # what is imported stays shared: no collection in a rank writes to its pages
        sys.stdout.flush()
        ranks: dict[int, int] = {}  # process → rank
        for rank in range(processes):
            group = next(iter(ranks), 0)  # the first one's
            pid = os.fork()
            if pid == 0:
                _become_rank(rank, processes, folder / "store", group, function, arguments)
            ranks[pid] = rank
            with contextlib.suppress(OSError):
                os.setpgid(pid, group or pid)  # the rank does so too: whoever comes first
        gc.unfreeze()
        return _wait(ranks, awaited)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(ranks: dict[int, int], awaited: set[signal.Signals]) -> Ending:
    """Until all ranks have ended. Signals wait for this loop (they are blocked), so none is lost
    and none interrupts it."""
    ending, group = Ending(), next(iter(ranks))
    asked_at, told_to_leave = 0.0, False
    while ranks:
        number = signal.sigwait(awaited)
        if number == signal.SIGCHLD:
            ended = [(rank, _exit_status(pid), pid) for pid, rank in ranks.items()]
            failed = [(rank, status) for rank, status, _ in ended if status]
            for _, status, pid in ended:
                if status is not None:
                    del ranks[pid]
            if failed and ending.failure is None:
                # of several, one that was killed
                ending.failure = min(failed, key=lambda one: one[1])
                signal.setitimer(signal.ITIMER_REAL, NOTICE_SECONDS)
        elif number == signal.SIGALRM and not told_to_leave:
            told_to_leave = True
            _send(ranks, signals.ABANDON)
            signal.setitimer(signal.ITIMER_REAL, KILL_SECONDS)
        elif number == signal.SIGALRM:
            os.killpg(group, signal.SIGKILL)
        elif not ending.received:
            ending.received, asked_at = [number], time.monotonic()
            _send(ranks, number)
        elif (
            not ending.at_once
            and number == ending.received[0]
            and time.monotonic() - asked_at > signals.SAME_REQUEST_SECONDS
        ):
            ending.at_once = True
            print(f"{signal.Signals(number).name} {signals.AGAIN}", file=sys.stderr, flush=True)
            os.killpg(group, signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return ending


def _exit_status(pid: int) -> int | None:
    """None while it runs; -signal where one killed it."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _send(ranks: dict[int, int], number: int) -> None:
    for pid in ranks:  # none is reaped but by us, so the number is still its own
        os.kill(pid, number)


def _sweep() -> None:
    """Remove the folders of this user's launchers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob("lattice-*-*"):
        pid = folder.name.split("-")[1]
        if (
            pid.isdecimal()
            and folder.lstat().st_uid == os.getuid()
            and folder.is_dir()
            and not folder.is_symlink()
        ):
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)
            except OSError:  # alive, and another user's
                continue


# --- the command ----------------------------------------------------------------------------------


def finish(ending: Ending, folder: Path) -> int:
    """Say why the run failed, last, in its folder if nobody else could; the exit status."""
    status = ending.status()
    if ending.at_once or (ending.failure is not None and status != 2):
        why = ending.why()
        stands = record_failure(folder, why)
        more = f": {stands}" if stands != why else ""
        if not ending.at_once:
            print(f"{why}{more}; the others were stopped", file=sys.stderr, flush=True)
    elif not status and (found := read_status(folder)).get("state") == "requeue":
        # One rank was asked, and all agreed: what is run after a finished run must not be run now.
        name = str(found.get("reason", "")).partition(" ")[0]
        status = 128 + signal.Signals[name] if name in signal.Signals.__members__ else 0
    return status


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="N", help="processes; the layout is then yours"
    )
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args()
    gpus = count_gpus()
    processes, overrides = (
        layout(gpus) if options.nproc_per_node is None else (options.nproc_per_node, [])
    )
    arguments = [options.config, *overrides, *options.overrides]
    try:
        check_processes(processes, gpus)
        config = load_config(options.config, arguments[1:])
        config.validate(processes)  # before a process of so many is started
    except UserError as error:
        log(f"error: {error}")
        sys.exit(2)
    print(f"+ torchrun --standalone --nproc-per-node {processes} train.py", *arguments, flush=True)
    sys.exit(finish(start_processes(processes, run_rank, arguments), Path(config.run.dir)))


if __name__ == "__main__":
    main()
