"""A rank that takes far too long for a step writes down where it is, and exits.

One rank that stands still (a broken driver, a file system that does not answer, a collective that
others never enter) makes all ranks wait in their next collective. All run this clock, and all are
in the same step; so all of them write their stacks within a moment, the one that is the cause and
those that wait for it, then exit, and the launcher starts the run again from its last checkpoint
(torchrun --max-restarts, or Slurm).

    RUN/hang/step-00000041-rank-00003.txt  what the rank waits in, every thread's stack, its last
                                           collectives

Too long is guard.hang_factor times the median step, and at least guard.hang_seconds. The clock runs
over steps and over batches of an evaluation; it rests before the first logged step (compilation and
connecting take what they take) and while something is saved or loaded, where the process groups'
own timeouts hold.
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
from typing import Any

import torch
import torch.distributed as dist

from runtime.events import append_event
from runtime.listener import Listener, Run
from runtime.messages import log
from runtime.status import write_status
from training.config import Config

LOOK_SECONDS = 1.0  # between two looks at the clock
GRACE_SECONDS = 10.0  # for the other ranks to write too: the launcher ends all when one exits
RECORDED = 16  # collectives
STDERR = 2  # the process's own, whatever Python's sys.stderr was made to be


class Watchdog(Listener):
    """Told of every boundary between steps; every rank has its own."""

    def __init__(self, config: Config) -> None:
        self.folder = Path(config.run.dir)
        self.factor, self.least = config.guard.hang_factor, config.guard.hang_seconds
        self.measured: deque[float] = deque(maxlen=64)  # seconds of a step
        self._step = 0
        self._limit = self._due = float("inf")  # seconds of a step; when, by the monotonic clock
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def step_done(self, step: int, step_seconds: float | None) -> None:
        """`step` steps are made, and the next thing begins. step_seconds: of one of them, where it
        was just measured."""
        self._step = step
        if step_seconds is not None:
            self.measured.append(step_seconds)
        if self.factor and self.measured:
            self._limit = max(self.least, self.factor * statistics.median(self.measured))
        self.beat()

    def after_step(self, run: Run) -> None:
        self.step_done(run.step, run.step_seconds)

    def beat(self) -> None:
        """Something as long as a step begins."""
        if self._closed.is_set():
            return
        self._due = time.monotonic() + self._limit
        if self._limit < float("inf"):
            # Where native code keeps Python's lock no thread of ours runs: this one, of the
            # interpreter's own, does.
            faulthandler.dump_traceback_later(
                self._limit + 2 * GRACE_SECONDS, exit=True, file=STDERR
            )

    @contextmanager
    def resting(self) -> Iterator[None]:
        """For what may take any time."""
        self._due = float("inf")
        faulthandler.cancel_dump_traceback_later()
        yield
        self.beat()

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._due = float("inf")
        faulthandler.cancel_dump_traceback_later()
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            if time.monotonic() > self._due:
                self._give_up()

    def _give_up(self) -> None:
        where = where_it_waits(threading.main_thread())
        rank = dist.get_rank()
        path = self.folder / "hang" / f"step-{self._step + 1:08d}-rank-{rank:05d}.txt"
        said = (
            f"rank {rank} is not done with step {self._step + 1} after {self._limit:.0f} s: {where}"
        )
        try:
            path.parent.mkdir(exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                print(said, *last_collectives(), "", sep="\n", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            said += f"; see {path}"
        except OSError as error:  # perhaps it is the file system that hangs
            said += f"; {path} cannot be written: {error}"
        log(said)
        if rank == 0:
            append_event(self.folder, "hang", step=self._step, where=where)
            hung = (
                f"step {self._step + 1} was not done after {self._limit:.0f} s: rank 0 {where}; "
                "hang/ has every rank"
            )
            write_status(self.folder, "failed", self._step, hung)
        time.sleep(GRACE_SECONDS)
        os._exit(1)  # not sys.exit: its clean-up would wait for the other ranks


def where_it_waits(thread: threading.Thread) -> str:
    """The innermost line of our own that a thread is at, and the collectives that this process
    entered and did not leave."""
    frame = sys._current_frames().get(thread.ident or 0)
    root = str(Path(__file__).parent.parent) + os.sep
    place = "nowhere"
    while frame is not None and place == "nowhere":
        file = frame.f_code.co_filename
        if file.startswith(root) and "site-packages" not in file:
            place = f"at {file.removeprefix(root)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    waiting = [describe(entry) for entry in recorded_collectives() if not entry["retired"]]
    return place + (
        f", waiting in {'; '.join(waiting[:4])}" if waiting else ", waiting in no collective"
    )


def last_collectives() -> list[str]:
    """The last ones of this process, oldest first."""
    lines = [
        describe(e) + (" (done)" if e["retired"] else " (not done)")
        for e in recorded_collectives()[-RECORDED:]
    ]
    return ["last collectives:", *lines]


def describe(entry: dict[str, Any]) -> str:
    """`gloo:all_reduce number 12 of mesh_tp, [[32, 16]] Float`."""
    name, group = entry["profiling_name"], entry["process_group"][-1]
    return (
        f"{name} number {entry['collective_seq_id']} of {group}, "
        f"{entry['input_sizes']} {' '.join(entry['input_dtypes'])}"
    )


def recorded_collectives() -> list[dict[str, Any]]:
    """What torch's flight recorders hold of this process, NCCL's and the one that gloo writes, each
    oldest first. Gloo's sends and receives are in neither."""
    recorders = [
        getattr(torch._C._distributed_c10d, f"_dump_{name}_trace_json", None)
        for name in ("nccl", "fr")
    ]
    return [
        entry
        for dump in recorders
        if dump is not None
        for entry in json.loads(dump()).get("entries", [])
    ]
