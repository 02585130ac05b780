"""checkpoint.interval=auto: save as often as costs the least time in all.

Saving more often costs more waits for saves; saving less often, more repeated steps after a
failure. The least sum is at √(2sM) seconds of training: s is what a save costs this run, measured,
and M the time between failures of a job of this size, from checkpoint.failures_per_gpu_day (Young,
"A first order approximation to the optimum checkpoint interval", Communications of the ACM 17,
1974; tools/plan/goodput.py has the whole sum).

Rank 0 measures and decides, and the decision is broadcast after a save, where the ranks communicate
anyway. Until this start has measured a second save, s is an estimate. With it, the decision is made
at the first two logged steps: the first may include compilation, so that until the second, saves
are too frequent rather than too rare. Which steps are saved changes no result, so a resumed run
need not choose the same.
"""

import math
import statistics
from collections import deque
from typing import Any

import torch.distributed as dist

from hardware import H100
from runtime.agreement import from_rank_0
from runtime.listener import Run
from runtime.output import log
from settings.config import Config

DAY = 86_400.0
# Published failure rates know nothing of a quota that runs out, or of a job that someone else ends.
MOST_SECONDS = 3600.0
BUSY = 2.0  # an interval is at least this many times as long as writing a checkpoint takes
REMEMBERED = 8  # waits for saves, of which the median counts
WORTH_CHANGING = 0.1  # a smaller relative change is not made


def mtbf_of(failures_per_gpu_day: float, gpus: int) -> float:
    """M, in seconds, of a job that any of its GPUs can interrupt; infinity if none fails."""
    per_day = failures_per_gpu_day * gpus
    return DAY / per_day if per_day else math.inf


def best_interval(save: float, mtbf: float) -> float:
    """Young's √(2sM), in seconds; infinity if nothing fails."""
    return math.sqrt(2 * save * mtbf) if math.isfinite(mtbf) else math.inf


def within_limits(seconds: float, write: float) -> float:
    """The interval that a run keeps to, if writing a checkpoint takes `write` seconds."""
    return min(max(seconds, BUSY * write), MOST_SECONDS)


class SaveInterval:
    """When the next save is due; the same on every rank.

    Args:
        config: the configuration of the run.
        step: the step from which this start begins: saved, or 0.
        local_bytes: of this rank's part of a checkpoint, for the estimate.
    """

    def __init__(self, config: Config, step: int, local_bytes: int) -> None:
        self.config, self.saved_at = config.checkpoint, step
        self.steps: int | None = None  # decided with `auto`
        self.estimated = local_bytes / H100.host_bytes_per_second
        # seconds, of the newest saves of this start but the first, which also allocates its copies
        self.waits: deque[float] = deque(maxlen=REMEMBERED)
        self.write = 0.0  # of the newest of them, in a background thread
        self._first: int | None = None  # the step of this start's first save

    def is_due(self, run: Run) -> bool:
        """Whether to save after this step. With `auto`, checkpoint.keep_every's are saved too."""
        interval, kept = self.config.interval, self.config.keep_every
        if interval == "never":
            return False
        if interval != "auto":
            return run.is_last or run.is_due(interval)
        # measured after a step that is logged: on all ranks
        is_first = len(run.watchdog.measured) <= 2 and not self.waits
        if run.step_seconds is not None and (is_first or self.steps is None):
            self._decide(run)
        elapsed = self.steps is not None and run.step - self.saved_at >= self.steps
        return elapsed or run.is_last or (kept > 0 and run.step % kept == 0)

    def saved(self, run: Run, waited: float, last: dict[str, Any]) -> None:
        """Note a save, and choose the interval anew.

        Args:
            run: after the step that was saved.
            waited: seconds for which training waited, as measured on the host.
            last: the event of the newest committed save (save.py); empty if there is none.
        """
        self.saved_at = step = run.step
        if self.config.interval != "auto":
            return
        if self._first is None:
            self._first = step
        else:
            # `last` knows how long the device waited; it may still be the first save
            known = last if last.get("step") != self._first else {}
            self.waits.append(max(waited, known.get("stall_seconds", 0.0)))
            self.write = known.get("write_seconds", 0.0)
        if run.watchdog.measured:
            self._decide(run)

    def _decide(self, run: Run) -> None:
        """Choose the interval on rank 0; every rank receives it."""
        self.steps = from_rank_0(lambda: self._choose(run))

    def _choose(self, run: Run) -> int:
        save = statistics.median(self.waits) if self.waits else self.estimated
        mtbf = mtbf_of(self.config.failures_per_gpu_day, dist.get_world_size())
        seconds = within_limits(best_interval(save, mtbf), self.write)
        steps = max(1, math.ceil(seconds / statistics.median(run.watchdog.measured)))
        if self.steps is not None and abs(steps - self.steps) <= WORTH_CHANGING * self.steps:
            return self.steps
        measured, fails = "measured" if self.waits else "estimated", math.isfinite(mtbf)
        expected = f"is expected after {mtbf / 3600:,.2f} h" if fails else "is never expected"
        log(
            f"checkpoint.interval=auto: every {steps:,} steps ({seconds:,.0f} s): a save costs "
            f"{save:.3g} s ({measured}), and a failure {expected}"
        )
        known = mtbf if fails else None  # JSON has no infinity
        run.log.event("interval", step=run.step, steps=steps, save_seconds=save, mtbf=known)
        return steps
