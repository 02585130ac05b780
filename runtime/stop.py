"""Planned stops: on request, all ranks stop after the same step, save and exit with status 0. A
restarted run continues.

    request                seen by                    effect
    SIGTERM, SIGUSR1       any rank                   save, exit
    SIGINT, SIGHUP         any rank                   save, exit
    train.max_minutes      rank 0's clock             save, exit
    file STOP in run.dir   rank 0, once per second    save, exit; the file is removed
    $LATTICE_STOP_FILE     rank 0, once per second    save, exit: from a job script to this start
    file SAVE in run.dir   rank 0, once per second    save, continue; the file is removed
    file SNAPSHOT          rank 0, once per second    memory reports (metrics/memory_report.py); the
      in run.dir                                      file is removed

If a rank stopped without the others, they would wait for it, so all ranks agree first. At each
boundary between steps, every rank posts its requests in an all-reduce that runs during the next
step, and reads the result of the all-reduce from the boundary before. No rank waits for a device,
or for another rank's host unless that is a whole step behind. Example: rank 2 gets a signal in
step 5.

    rank 0   step 5 ─┬─ step 6 ─┬─ save, exit
    rank 1   step 5 ─┼─ step 6 ─┼─ save, exit
    rank 2   ste↯ 5 ─┴─ step 6 ─┴─ save, exit
                    post       read

    a request               takes effect
    while the run starts    before the first step: no step is done, nothing is saved
    during a step           after the next step
    during a save           after the next step
    during an evaluation    after the next batch; the evaluation is abandoned

These all-reduces have their own gloo process group, because steps and background saves issue their
collectives at other times, and ranks that issue the collectives of one group in different orders
wait for each other forever.

If another rank is dead, or does not post although this rank has received a signal, this rank exits
with status 1 and saves nothing (`fail` in exit.py): when a rank has died, torchrun sends
SIGTERM to the others.
"""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from runtime import signals
from runtime.exit import LostConnection
from runtime.output import log
from runtime.signals import Signals
from settings.config import Config

# Sources of a stop request → the reason for status.json. If ranks have different requests, the last
# one in this order wins.
REASONS = {
    "": "",
    "time": "train.max_minutes was reached",
    "job": "the job script requested a stop",
    "SIGUSR1": "SIGUSR1 was received",
    "STOP": "the file STOP was found",  # the job script does not requeue the job then
    "SIGHUP": "SIGHUP was received",
    "SIGINT": "SIGINT was received",
    "SIGTERM": "SIGTERM was received",
}
FILES = ("SAVE", "SNAPSHOT")  # in run.dir: requests after which the run continues
LOOK_SECONDS = 1.0  # between two checks for files


class StopRequests:
    """The requests that all ranks agree on. Every rank opens it, calls `agree` at the
    same boundaries, and closes it.

    Args:
        config: the configuration of the run.
        signals: the signals that this process has received since it started.
    """

    def __init__(self, config: Config, signals: Signals) -> None:
        self.folder, self.max_seconds = Path(config.run.dir), config.train.max_minutes * 60
        self.reason = ""  # why the run stops, once agreed
        self.agreed_files: set[str] = set()  # of FILES: agreed on and not done yet
        self.signals = signals
        self._more: Callable[[], list[int]] = list
        self._received: Callable[[list[int]], None] = lambda maxima: None
        self._group = dist.new_group(backend="gloo")
        self._looks_next = 0.0

    @property
    def agreed(self) -> bool:
        """Whether all ranks have agreed to stop."""
        return bool(self.reason)

    @property
    def wants_save(self) -> bool:
        return self.agreed or "SAVE" in self.agreed_files

    def carry(self, more: Callable[[], list[int]], received: Callable[[list[int]], None]) -> None:
        """Exchange more at each boundary, beside the requests: `more` returns numbers of int32, as
        many on every rank; `received` gets their maxima over all ranks a step later."""
        self._more, self._received = more, received

    def agree(self) -> bool:
        """Read what all ranks posted at the boundary before, and post the requests of this rank.
        Returns whether a stop is agreed on. Called at a boundary between steps."""
        self._wait()
        reason, *carried = self._posted.tolist()
        files, carried = carried[: len(FILES)], carried[len(FILES) :]
        if carried:
            self._received(carried)
        self.reason = self.reason or list(REASONS.values())[reason]
        self.agreed_files |= {name for name, found in zip(FILES, files, strict=True) if found}
        self._post()
        if self.agreed:  # the request may have reached only another rank
            self.signals.announce(self.reason)
        return self.agreed

    def done(self, name: str) -> None:
        """Clear a request of FILES that has been fulfilled, if there was one."""
        if name in self.agreed_files and dist.get_rank() == 0:
            self._remove(name)
        self.agreed_files.discard(name)

    def open(self) -> None:
        """Read what was requested while the run started."""
        self._post()
        self.agree()

    def close(self, stays: bool) -> None:
        """Wait for the last exchange, at the end of a run that did not fail. `stays`: the run goes
        on with another data stage, which must find the file STOP; otherwise that is removed,
        because the next start would stop at once."""
        self._wait()
        if dist.get_rank() == 0 and not stays:
            if self.agreed and self._has("STOP"):  # perhaps it came while the run was stopping
                self.reason = REASONS["STOP"]
            self._remove("STOP")

    def _post(self) -> None:
        # a copy, because another thread may add to it
        asked = [signal.Signals(number).name for number in list(self.signals.heard)]
        files, now = [False] * len(FILES), time.monotonic()
        if dist.get_rank() == 0:
            if self.max_seconds and now - signals.STARTED >= self.max_seconds:
                asked.append("time")
            if now >= self._looks_next:
                self._looks_next = now + LOOK_SECONDS
                asked += ["STOP"] if self._has("STOP") else []
                asked += ["job"] if os.path.exists(os.environ.get("LATTICE_STOP_FILE", "")) else []
                files = [name not in self.agreed_files and self._has(name) for name in FILES]
        self._posted = torch.tensor(
            [max(map(list(REASONS).index, asked), default=0), *files, *self._more()],
            dtype=torch.int32,
        )
        # Element-wise maximum over all ranks of three int32, and of what `carry` adds (after a
        # logged step, as many as there are ranks); on the hosts, read at the next boundary.
        self._work = dist.all_reduce(
            self._posted, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )

    def _has(self, name: str) -> bool:
        return os.path.exists(self.folder / name)  # which never raises

    def _remove(self, name: str) -> None:
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            log(f"warning: {self.folder / name} cannot be removed: {error}")

    def _wait(self) -> None:
        """Wait until every rank has posted: without limit (a rank may be compiling), but only for
        PATIENCE_SECONDS once this rank has received a signal."""
        patience = signals.PATIENCE_SECONDS
        while not self._work.is_completed():
            try:
                self._work.wait(timedelta(seconds=1))
            except RuntimeError:
                patience -= bool(self.signals.heard)
                if not patience:
                    raise LostConnection(
                        f"the other ranks did not respond for {signals.PATIENCE_SECONDS} s"
                    ) from None
        self._work.wait()  # raises if the all-reduce failed
