"""Starts a run on this machine; `make train` calls it.

    python -m tools.launch [--nproc-per-node N] CONFIG [section.key=value …]

With --nproc-per-node, it starts N processes, as torchrun would, with the layout of the file and the
overrides. Without it, the number of processes depends on the machine. On a machine without GPUs: 8
processes over gloo, one thread each, with the layout of the file. With GPUs: one process per GPU,
rounded down to a power of two and at most 8, over NCCL, in bfloat16, in a layout that fits their
number. Your own overrides are applied last, so they take precedence.

    launcher  imports ─┬ fork … fork ─┬─ waits ──────┬─ removes the store, exits with the first
    rank r             └── joins, trains: train.main ┘  failure's status

Modules are imported once, and the ranks share their memory. The ranks' rendezvous is a file in a
folder that only this user may enter. The only ports opened are those of gloo and NCCL, on the
loopback interface. (Anyone who can reach torchrun's port can run code as you: docs/running.md.)

A signal that requests a stop is passed to every rank once; a second one ends the run at once. The
ranks are in a separate process group, so that Ctrl-C reaches them only through the launcher. The
exit status is 0; or that of the first failure; or 2 if the configuration is refused; or 128 + the
signal's number if a signal ended the run.
"""

import signal

from runtime import signals
from runtime.output import guard_output, log

if __name__ == "__main__":  # before the other imports, which take seconds
    guard_output()
    signals.leave_on_request()
    # threads that imports start inherit it; else one may take the signal from _wait's sigwait
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])

import contextlib
import gc
import itertools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
import torch._dynamo  # the first use of DTensor would import it in each rank; here it is shared
import torch.distributed as dist

import train
from errors import UserError
from runtime.log.status import read_status, record_failure
from runtime.signals import Signals
from runtime.start.environment import check_environment
from settings.checks import validate
from settings.layouts import valid_layout
from settings.load import load_config
from tools.command import CommandParser, at_least, reports_errors

# the smallest world in which tensor, pipeline and data parallelism all have two ranks
MAX_PROCESSES = 8
# From a failure until the other ranks are sent ABANDON: they notice it, and rank 0 records it.
NOTICE_SECONDS = 2.0
KILL_SECONDS = 15.0  # from then until the remaining ranks are killed


def layout(num_gpus: int, path: str, overrides: list[str]) -> tuple[int, list[str]]:
    """The number of processes to start, and the overrides that fit the configuration to it.

    The number of GPUs used is a power of two, which divides the batch and the heads. Its factors
    of two go first to cp, as far as the configuration has it (a long sequence needs it), then to
    tp, to pp, and the rest to data parallelism: to dp_shard, or with zero_stage 0 to dp_replicate.
    Of these layouts, it is the first that the configuration allows. Experts, if there are any, fit
    on one GPU. A configuration with `parallel.layouts` keeps them.

    Raises:
        UserError: the configuration allows none; why it does not allow the first.
    """
    if num_gpus == 0:
        return MAX_PROCESSES, []
    processes, dtype = 1 << (min(num_gpus, MAX_PROCESSES).bit_length() - 1), "train.dtype=bfloat16"
    given, refused = load_config(path, overrides).parallel, None
    if given.layouts:
        return processes, [dtype]
    cp_sizes = [given.cp >> n for n in range(given.cp.bit_length())]
    for cp, tp, pp in itertools.product(cp_sizes, (2, 1), (2, 1)):
        rest, left_over = divmod(processes, cp * tp * pp)
        if left_over:
            continue
        dp_shard, dp_replicate = (-1, 1) if given.zero_stage else (1, rest)
        sizes = {"tp": tp, "pp": pp, "cp": cp, "dp_shard": dp_shard, "dp_replicate": dp_replicate}
        axes = [f"parallel.{axis}={size}" for axis, size in {**sizes, "ep": 1}.items()]
        try:
            validate(load_config(path, [*axes, dtype, *overrides]), processes)
            return processes, [*axes, dtype]
        except UserError as error:
            refused = refused or error
    assert refused is not None  # all sizes 1 always divide
    raise refused


def count_gpus() -> int:
    """The number of GPUs, counted in a child process: one that has initialized CUDA cannot fork."""
    pid = os.fork()
    if pid == 0:
        os._exit(torch.cuda.device_count())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:  # not "none": the run would train on the CPU
        why = f"counting them ended by {signal.Signals(-status).name}"
        raise UserError("GPUs", None, why, "see whether nvidia-smi works here")
    return status


# --- a rank ---------------------------------------------------------------------------------------


def _become_rank(
    launcher: int, group: int, rank: int, processes: int, work: Callable[[Signals], None]
) -> NoReturn:
    """Runs `work` in the forked process as a rank, and exits."""
    status = 1
    try:
        os.setpgid(0, group)
        heard = Signals(speaks=rank == 0).listen()
        # not SIGINT or SIGTERM, which may have been sent before: a second one ends the rank at once
        signals.end_with_parent(launcher, signal.SIGUSR1)
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(processes)})
        os.environ.update({"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)})
        work(heard)
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
        if isinstance(leaving.code, str):
            log(leaving.code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # returning would run the launcher's code


# --- the launcher ---------------------------------------------------------------------------------


@dataclass
class Ending:
    """How the ranks ended."""

    launched: float = field(default_factory=time.time)
    failure: tuple[int, int] | None = None  # the first one: (exit status or -signal, rank)
    received: int = 0  # the signal that requested a stop, if any
    at_once: bool = False  # whether a second one requested that they be killed

    def why(self) -> str:
        if self.at_once:
            return f"{signal.Signals(self.received).name} was received twice"
        assert self.failure is not None
        status, rank = self.failure
        if status < 0:
            return f"rank {rank} was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"rank {rank} ended with status {status}"

    def status(self) -> int:
        if self.failure is not None and not self.at_once:
            return max(self.failure[0], 1)
        return 128 + self.received if self.received else 0


def start_processes(processes: int, function: Callable[..., None], *arguments: object) -> Ending:
    """Runs `function(*arguments, signals, store)` in forked processes, the ranks of one world, and
    waits until all have ended."""
    awaited = {*signals.requests(), signal.SIGCHLD, signal.SIGALRM}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    # the default action, ignoring it, would hide it from sigwait on macOS
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # mode 0700
    with tempfile.TemporaryDirectory(prefix="lattice-", ignore_cleanup_errors=True) as folder:

        def work(heard: Signals) -> None:
            function(*arguments, heard, dist.FileStore(f"{folder}/store", processes))

        gc.collect()
        gc.freeze()  # keeps the pages of imported modules shared: collections do not write to them
        sys.stdout.flush()
        launcher, ranks = os.getpid(), dict[int, int]()  # process → rank
        for rank in range(processes):
            group = next(iter(ranks), 0)  # the first rank's process id
            pid = os.fork()
            if pid == 0:
                _become_rank(launcher, group, rank, processes, work)
            ranks[pid] = rank
            with contextlib.suppress(OSError):
                os.setpgid(pid, group or pid)  # the rank does so too; either may come first
        gc.unfreeze()
        return _wait(ranks, awaited)


def _wait(ranks: dict[int, int], awaited: set[signal.Signals]) -> Ending:
    """Waits until all ranks have ended. Signals are blocked and received only by sigwait, so none
    is lost and none interrupts this loop."""
    ending, group = Ending(), next(iter(ranks))
    asked_at, told_to_leave = 0.0, False

    def send(number: int) -> None:
        for pid in ranks:  # only this process reaps them, so no id has been reused
            os.kill(pid, number)

    while ranks:
        number = signal.sigwait(awaited)
        if number == signal.SIGCHLD:
            failed = []
            for pid in [*ranks]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    failed.append((os.waitstatus_to_exitcode(status), ranks.pop(pid)))
            failed = [each for each in failed if each[0]]
            if failed and ending.failure is None:
                # if several failed, prefer one that was killed (a negative status)
                ending.failure = min(failed)
                signal.setitimer(signal.ITIMER_REAL, NOTICE_SECONDS)
        elif number == signal.SIGALRM and not told_to_leave:
            told_to_leave = True
            send(signals.ABANDON)
            signal.setitimer(signal.ITIMER_REAL, KILL_SECONDS)
        elif number == signal.SIGALRM:
            os.killpg(group, signal.SIGKILL)
        elif not ending.received:
            ending.received, asked_at = number, time.monotonic()
            send(number)
        elif (
            not ending.at_once
            and number == ending.received
            and time.monotonic() - asked_at > signals.SAME_REQUEST_SECONDS
        ):
            ending.at_once = True
            log(f"{signal.Signals(number).name} {signals.AGAIN}")
            os.killpg(group, signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return ending


# --- the command ----------------------------------------------------------------------------------


def finish(ending: Ending, folder: Path) -> int:
    """Prints why the run failed, as the last line, and records it in the run folder unless a rank
    has done so. Returns the exit status."""
    status = ending.status()
    if ending.at_once or (ending.failure is not None and status != 2):
        why = ending.why()
        stands = record_failure(folder, why, ending.launched)
        more = f": {stands}" if stands != why else ""
        if not ending.at_once:
            log(f"{why}{more}; the others were stopped")
    elif not status and (found := read_status(folder)).get("state") == "requeue":
        # One rank received the signal, and all stopped. A nonzero status keeps a calling script
        # from continuing as after a finished run.
        name = str(found.get("reason", "")).partition(" ")[0]
        status = 128 + signal.Signals[name] if name in signal.Signals.__members__ else 0
    return status


@reports_errors
def main() -> int:
    parser = CommandParser(prog="python -m tools.launch", description=__doc__)
    number = "number of processes; the layout is then that of the configuration"
    parser.option("--nproc-per-node", int, "N", number)
    parser.configuration("CONFIG.yaml", "what to train")
    options = parser.parse_intermixed_args()
    processes, overrides = options.nproc_per_node, []
    at_least(1, nproc_per_node=processes)
    check_environment(is_rank=False)
    gpus = count_gpus()
    if processes is None:
        processes, overrides = layout(gpus, options.config, options.overrides)
    elif 0 < gpus < processes:
        why = f"this machine has {gpus} GPUs"
        raise UserError("--nproc-per-node", processes, why, f"give 1 to {gpus}")
    arguments = [options.config, *overrides, *options.overrides]
    # Before any process is started. There are no spares: nodes do not come and go here.
    config, processes = valid_layout(load_config(options.config, arguments[1:]), processes)
    log(" ".join([f"{processes} processes on this machine: train.py", *arguments]), sys.stdout)
    return finish(start_processes(processes, train.main, arguments), Path(config.run.dir))


if __name__ == "__main__":
    sys.exit(main())
