"""checkpoint.interval=auto: save as often as costs the least time in all.

Saving more often costs more waits for saves; saving less often, more repeated steps after a
failure. The least sum is at √(2sM) seconds of training (goodput.py): s is what a save costs
this run, measured, and M the time between failures of a job of this size, from
checkpoint.failures_per_gpu_day.

Rank 0 measures and decides, and the decision is broadcast after a save, where the ranks communicate
anyway. Before the first save it is made at the first two logged steps, with the saves of earlier
starts or an estimate: the first may include compilation, so that until the second, saves are too
frequent rather than too rare. Which steps are saved changes no result, so a resumed run need not
choose the same.
"""

import math
import statistics
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hardware import H100
from runtime.checkpoint.goodput import best_interval, mtbf_of
from runtime.listener import Run
from runtime.log.events import read_events
from runtime.messages import from_rank_0, log
from settings.config import Config

# Published failure rates know nothing of a quota that runs out, or of a job that someone else ends.
MOST_SECONDS = 3600.0
BUSY = 2.0  # an interval is at least this many times as long as writing a checkpoint takes
REMEMBERED = 8  # saves, and logged steps, of which the median counts
WORTH_CHANGING = 0.1  # a smaller relative change is not made


class SaveInterval:
    """When the next save is due; the same on every rank.

    Args:
        config: the configuration of the run.
        step: the step from which this start begins: saved, or 0.
        local_bytes: of this rank's part of a checkpoint, for the first estimate.
        device: "cuda" or "cpu".
    """

    def __init__(self, config: Config, step: int, local_bytes: int, device: str) -> None:
        self.config, self.device = config.checkpoint, device
        self.folder = Path(config.run.dir)
        self.saved_at = step
        self.steps: int | None = None  # decided with `auto`
        self.estimated = local_bytes / H100.host_bytes_per_second
        self.waits: list[float] = []  # seconds, for each save of this start after the first
        self.writes: list[float] = []
        self.step_seconds: list[float] = []  # of the newest logged steps
        self._logged = 0
        self._first: int | None = None  # the step of this start's first save

    @property
    def is_auto(self) -> bool:
        return self.config.interval == "auto"

    def is_due(self, run: Run) -> bool:
        """Whether to save after this step. With `auto`, checkpoint.keep_every's are saved too."""
        interval = self.config.interval
        if interval == "never":
            return False
        if interval != "auto":
            return run.is_last or run.is_due(interval)
        if run.step_seconds is not None:  # measured, after a step that is logged: on all ranks
            self.step_seconds = [*self.step_seconds, run.step_seconds][-REMEMBERED:]
            self._logged += 1
            if self._logged <= 2 and not self.waits:
                self._decide(run)
        elapsed = self.steps is not None and run.step - self.saved_at >= self.steps
        kept = self.config.keep_every
        return elapsed or run.is_last or (kept > 0 and run.step % kept == 0)

    def saved(self, run: Run, waited: float, last: dict[str, Any]) -> None:
        """Note a save, and choose the interval anew.

        Args:
            run: after the step that was saved.
            waited: seconds for which training waited, as measured on the host.
            last: the event of the newest committed save (save.py); empty if there is none.
        """
        self.saved_at = step = run.step
        if not self.is_auto:
            return
        if self._first is None:  # the first one also allocates its copies
            self._first = step
        else:
            # `last` knows how long the device waited; it may still be the first save
            known = last if last.get("step") != self._first else {}
            self.waits.append(max(waited, known.get("stall_seconds", 0.0)))
            if known:
                self.writes.append(known["write_seconds"])
        del self.waits[:-REMEMBERED], self.writes[:-REMEMBERED]
        if self.step_seconds:
            self._decide(run)

    def went_back(self, step: int) -> None:
        self.saved_at = step

    def _decide(self, run: Run) -> None:
        """Choose the interval on rank 0; every rank receives it."""
        self.steps = from_rank_0(lambda: self._choose(run), self.device)

    def _choose(self, run: Run) -> int:
        waits, writes = self.waits, self.writes
        if not waits:
            waits, writes = measured_saves(read_events(self.folder))
        save = statistics.median(waits) if waits else self.estimated
        write = statistics.median(writes) if writes else 0.0
        mtbf = mtbf_of(self.config.failures_per_gpu_day, dist.get_world_size())
        seconds = min(max(best_interval(save, mtbf), BUSY * write), MOST_SECONDS)
        steps = max(1, math.ceil(seconds / statistics.median(self.step_seconds)))
        if self.steps is not None and abs(steps - self.steps) <= WORTH_CHANGING * self.steps:
            return self.steps
        if steps != self.steps:
            measured = "measured" if waits else "estimated"
            fails = math.isfinite(mtbf)
            expected = f"is expected after {mtbf / 3600:,.2f} h" if fails else "is never expected"
            log(
                f"checkpoint.interval=auto: every {steps:,} steps ({seconds:,.0f} s): a save costs "
                f"{save:.3g} s ({measured}), and a failure {expected}"
            )
            known = mtbf if fails else None  # JSON has no infinity
            run.log.event("interval", step=run.step, steps=steps, save_seconds=save, mtbf=known)
        return steps


def measured_saves(events: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """The seconds for which training waited for a save, and those until it was committed, of the
    newest saves of a run; without the first of each start or stage, which allocates memory."""
    waits, writes, first = [], [], True
    for event in events:
        if event["event"] in ("start", "stage"):
            first = True
        elif event["event"] == "checkpoint" and "failed" not in event:
            if not first:
                waits.append(event["stall_seconds"])
                writes.append(event["write_seconds"])
            first = False
    return waits[-REMEMBERED:], writes[-REMEMBERED:]
