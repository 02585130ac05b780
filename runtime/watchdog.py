"""Detect a hung step: a rank that takes far too long writes down where it is, and exits.

One rank that hangs (a broken driver, a file system that does not respond, a collective that others
never enter) makes all ranks wait in their next collective. All ranks run this watchdog and are in
the same step, so all of them write their stacks at about the same time, both the rank that causes
the hang and those that wait for it. Then they exit, and the launcher restarts the run from its last
checkpoint (torchrun --max-restarts, or Slurm).

    RUN/hang/step-00000041-rank-00003.txt  the collectives in which the rank waits, its last
                                           collectives, and the stack of every thread

The limit is guard.hang_factor times the median step time, and at least guard.hang_seconds. The
clock runs during steps and during batches of an evaluation. It is paused before the first logged
step (compilation and connection setup may take any time) and while something is saved or loaded,
where the timeouts of the process groups apply.
"""

import faulthandler
import json
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from runtime.device import device_thread
from runtime.log.run_log import RunLog
from runtime.output import log
from settings.config import Config

LOOK_SECONDS = 1.0  # between two checks of the clock
GRACE_SECONDS = 10.0  # so that the other ranks can write too: the launcher ends all when one exits
RECORDED = 16  # collectives in a report
NOWHERE = "nowhere"  # in no line of this repository
STDERR = 2  # the file descriptor, in case Python's sys.stderr was replaced


class Watchdog:
    """Ends this process if a step takes too long; every rank has one."""

    def __init__(self, config: Config, run_log: RunLog) -> None:
        self.folder, self.log = Path(config.run.dir), run_log
        self.factor, self.least = config.guard.hang_factor, config.guard.hang_seconds
        self.measured: deque[float] = deque(maxlen=64)  # recent step times, in seconds
        self._step = 0
        # the longest allowed step, in seconds; the deadline, by the monotonic clock
        self._limit = self._due = float("inf")
        self._closed = threading.Event()
        self._thread = device_thread(self._watch, "watchdog")

    @property
    def usual_step(self) -> float | None:
        """The median of recent step times, in seconds; None before the first."""
        return statistics.median(self.measured) if self.measured else None

    def step_done(self, step: int, step_seconds: float | None) -> None:
        """Note that `step` steps are done, update the limit and restart the clock. step_seconds:
        the time of one step if it was just measured."""
        self._step = step
        if step_seconds is not None:
            self.measured.append(step_seconds)
        if self.factor and self.usual_step is not None:
            self._limit = max(self.least, self.factor * self.usual_step)
        self.beat()

    def beat(self) -> None:
        """Restart the clock: something that takes at most as long as a step begins."""
        if self._closed.is_set():
            return
        self._due = time.monotonic() + self._limit
        if self._limit < float("inf"):
            # If native code holds Python's lock (the GIL), the watchdog thread cannot run;
            # faulthandler's thread does not need the lock.
            faulthandler.dump_traceback_later(
                self._limit + 2 * GRACE_SECONDS, exit=True, file=STDERR
            )

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Pause the clock around work that may take any time."""
        before, self._due = self._due, float("inf")
        faulthandler.cancel_dump_traceback_later()
        yield
        if before < float("inf"):  # else within another rest, or before a step was measured
            self.beat()

    def start(self) -> "Watchdog":
        self._thread.start()
        return self

    def close(self) -> None:
        self._due = float("inf")
        faulthandler.cancel_dump_traceback_later()
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            if time.monotonic() > self._due:
                self._give_up()

    def _give_up(self) -> None:
        where = where_it_waits()
        rank = dist.get_rank()
        path = self.folder / "hang" / f"step-{self._step + 1:08d}-rank-{rank:05d}.txt"
        said = (
            f"rank {rank} has not finished step {self._step + 1} after {self._limit:.0f} s: {where}"
        )
        try:
            path.parent.mkdir(exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                print(f"{said}\nlast collectives:", file=file)
                for text, is_done in recorded_collectives()[-RECORDED:]:
                    print(f"{text} ({'done' if is_done else 'not done'})", file=file)
                print(file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            said += f"; see {path}"
        except OSError as error:  # the file system may be the cause of the hang
            said += f"; {path} cannot be written: {error}"
        log(said)
        if rank == 0:
            self.log.event("hang", step=self._step, where=where)
            hung = f"step {self._step + 1} hung: {said}; for the other ranks see the folder hang/"
            self.log.end("failed", hung, step=self._step)
        time.sleep(GRACE_SECONDS)
        os._exit(1)  # not sys.exit: its clean-up would wait for the other ranks


def where_it_waits() -> str:
    """Describe the innermost line of this repository that each other thread is executing, the main
    thread's first, and the collectives that this process has entered and not left.

    On a GPU, backward runs in a thread of autograd, which C++ has started: while it runs Python, it
    has a frame here, but no name.
    """
    frames = sys._current_frames()
    main, this = threading.main_thread().ident, threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    place = innermost_line(frames.get(main or 0))
    others = [
        f"; {names.get(ident, 'a C++ thread (autograd)')} {line}"
        for ident, frame in frames.items()
        if ident not in (main, this) and (line := innermost_line(frame)) != NOWHERE
    ]
    waiting = [text for text, is_done in recorded_collectives() if not is_done]
    collectives = "; ".join(waiting[:4]) or "no collective"
    return f"{place}, waiting in {collectives}{''.join(others)}"


def innermost_line(frame: FrameType | None) -> str:
    """The line of this repository that a thread with this innermost frame is executing."""
    root = str(Path(__file__).parent.parent) + os.sep
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(root) and "site-packages" not in file:
            return f"at {file.removeprefix(root)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return NOWHERE


def recorded_collectives() -> list[tuple[str, bool]]:
    """The entries of torch's flight recorders, NCCL's and gloo's, oldest first: `gloo:all_reduce
    number 12 of mesh_tp, [[32, 16]] Float`, and whether it is done. Gloo's sends and receives are
    not recorded."""
    found = []
    for recorder in ("nccl", "fr"):
        dump = getattr(torch._C._distributed_c10d, f"_dump_{recorder}_trace_json", None)
        batches: dict[int, bool] = {}  # of each group, the batch that follows: whether it is done
        for entry in reversed(json.loads(dump()).get("entries", []) if dump is not None else []):
            name, is_done = entry["profiling_name"], entry["retired"]
            # NCCL marks no single message of a batch as done, only the entry that ends the batch
            # (pytorch issue 137969).
            if name.endswith(":coalesced"):
                batches[entry["pg_id"]] = is_done
            elif entry["is_p2p"]:
                is_done |= batches.get(entry["pg_id"], False)
            what = f"{entry['input_sizes']} {' '.join(entry['input_dtypes'])}"
            of = f"number {entry['collective_seq_id']} of {entry['process_group'][-1]}"
            found.append((entry["time_created_ns"], f"{name} {of}, {what}", is_done))
    return [(said, is_done) for _, said, is_done in sorted(found)]
