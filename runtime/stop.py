"""Planned stops: whoever asks, all ranks stop after the same step, save and leave with status 0.
Started again, a run goes on.

    asked by               seen by              obeyed
    SIGTERM, SIGUSR1       any rank             save, leave
    SIGINT, SIGHUP         any rank             save, leave
    train.max_minutes      rank 0's clock       save, leave
    file STOP in run.dir   rank 0, each second  save, leave; the file is removed
    file SAVE in run.dir   rank 0, each second  save, go on; the file is removed

A rank that stopped by itself would leave the others waiting, so they agree. At each boundary
between steps every rank posts what it was asked, in an all-reduce that runs while the next step
does, and reads what was posted at the boundary before. Nothing waits for a device, and for another
rank's host only where that is a whole step behind. Rank 2 is signalled in step 5:

    rank 0   step 5 ─┬─ step 6 ─┬─ save, leave
    rank 1   step 5 ─┼─ step 6 ─┼─ save, leave
    rank 2   ste↯ 5 ─┴─ step 6 ─┴─ save, leave
                    post       read

    asked                   agreed
    while the run starts    before its first step: no step is made, nothing is saved
    in a step               after the step that follows
    in a save               after the step that follows
    in an evaluation        after the batch that follows; the evaluation is abandoned

The process group is one of its own, over gloo: collectives of a save in the background, or of a
step, that met these in another order on another rank would wait forever.

Where a peer is dead, or does not post while this rank holds a signal, the rank saves nothing and
leaves with status 1 (messages.py's `fail`): torchrun sends SIGTERM to the survivors of a rank that
died.
"""

import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from runtime import signals
from runtime.listener import Listener, Run
from runtime.messages import LostConnection
from runtime.signals import Signals
from training.config import Config

# Who may ask for a stop, the most urgent last: ranks that were asked differently agree on that one.
# → status.json's reason
REASONS = {
    "": "",
    "time": "train.max_minutes are over",
    "STOP": "the file STOP was found",
    "SIGUSR1": "SIGUSR1 was received",
    "SIGHUP": "SIGHUP was received",
    "SIGINT": "SIGINT was received",
    "SIGTERM": "SIGTERM was received",
}
LOOK_SECONDS = 1.0  # between two looks for files


class StopRequests(Listener):
    """What is asked of this run, agreed on by all ranks. Every rank enters, and calls `agree` at
    the same boundaries.

    Args:
        config: of the run.
        signals: that this process has heard, from its first line on.
    """

    def __init__(self, config: Config, signals: Signals) -> None:
        self.folder, self.max_seconds = Path(config.run.dir), config.train.max_minutes * 60
        self.reason = ""  # why the run stops, once agreed
        self.save_agreed = False  # and not done yet
        self.signals = signals
        self._group = dist.new_group(backend="gloo")
        self._looks_next = 0.0

    @property
    def agreed(self) -> bool:
        """Whether the run stops: the same on every rank."""
        return bool(self.reason)

    @property
    def wants_save(self) -> bool:
        return self.agreed or self.save_agreed

    def agree(self) -> bool:
        """At a boundary: read what all ranks posted at the one before, and post what was asked
        since. Is a stop agreed?"""
        self._wait()
        reason, save = self._posted.tolist()
        self.reason = self.reason or list(REASONS.values())[reason]
        self.save_agreed = self.save_agreed or bool(save)
        self._post()
        if self.agreed:  # perhaps only another rank was asked
            self.signals.announce(self.reason)
        return self.agreed

    def begins(self, run: Run) -> None:
        if self.agreed:  # while it started
            run.end(self.reason)

    def after_step(self, run: Run) -> None:
        if self.agree():
            run.end(self.reason)

    def saved(self) -> None:
        """What asked for a save has it."""
        if self.save_agreed and dist.get_rank() == 0:
            (self.folder / "SAVE").unlink(missing_ok=True)
        self.save_agreed = False

    def __enter__(self) -> "StopRequests":
        self._post()
        self.agree()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._wait()  # for what was posted last
            if dist.get_rank() == 0:
                # else the next start would stop at once
                (self.folder / "STOP").unlink(missing_ok=True)

    def _post(self) -> None:
        # copied: it may grow
        asked = [signal.Signals(number).name for number in list(self.signals.heard)]
        save = False
        now = time.monotonic()
        if dist.get_rank() == 0:
            if self.max_seconds and now - signals.STARTED >= self.max_seconds:
                asked.append("time")
            if now >= self._looks_next:
                self._looks_next = now + LOOK_SECONDS
                asked += ["STOP"] if (self.folder / "STOP").exists() else []
                save = not self.save_agreed and (self.folder / "SAVE").exists()
        self._posted = torch.tensor(
            [max(map(list(REASONS).index, asked), default=0), save], dtype=torch.int32
        )
        # Maximum of two int32 over the world, on the hosts; read at the next boundary.
        self._work = dist.all_reduce(
            self._posted, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )

    def _wait(self) -> None:
        """Until every rank has posted: as long as that takes (one may be compiling), but with a
        signal in hand not forever."""
        patience = signals.PATIENCE_SECONDS
        while not self._work.is_completed():
            try:
                self._work.wait(timedelta(seconds=1))
            except RuntimeError:
                patience -= bool(self.signals.heard)
                if not patience:
                    raise LostConnection(
                        f"nothing was heard of the other ranks for {signals.PATIENCE_SECONDS} s"
                    ) from None
        self._work.wait()  # raises what went wrong
