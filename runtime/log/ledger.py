"""Account for a run's time: every second from its first start to its last line has one cause, but
for those between the end of the training and a start that is to train further.

    steps       training that is part of the final result
    lost        repeated steps after a failure or a rollback; waiting in a failed step
    data        waiting for the next batch
    evaluation  the loss on held-out text, and tasks
    saving      the checks before a save, and waiting until the state has been copied
    examination comparing copies without a save; computing a suspicious step again (health/)
    rollback    finding and loading a checkpoint in the middle of a run
    start       from the process's first line to its first step: imports, data, weights, checkpoint;
                and from the end of a data stage to the first step of the next
    end         from the last step to the process's end: the last save
    down        from a start's last line to the next start: the steps since that line, noticing the
                failure, starting processes (nothing after a start that has finished the training)

Rank 0 writes `spent` lines to events.jsonl during the run (RunLog); Account sums them up. When a
process is killed, the seconds since its last line are not recorded and count as `down`.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from runtime import signals
from runtime.log.events import CAUSES


class Ledger:
    """The account of this process, by the causes above, and the clock of its steps."""

    def __init__(self) -> None:
        self.counted_until = signals.STARTED  # time.monotonic
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._steps, self._waited = 0, 0.0  # since then

    def step_done(self, waited: float) -> None:
        """Count a step, which has waited so many seconds for its batch."""
        self._steps += 1
        self._waited += waited

    def step_seconds(self) -> tuple[float, float]:
        """The mean seconds of a step since the last call of `spent`, and those of them in which it
        waited for its batch."""
        seconds = time.monotonic() - self.counted_until
        return seconds / self._steps, self._waited / self._steps

    def spent(self, cause: str) -> None:
        """Attribute the time since the last call to `cause`, except what was spent waiting for
        batches."""
        now = time.monotonic()
        self.seconds[cause] += now - self.counted_until - self._waited
        self.seconds["data"] += self._waited
        self.counted_until, self._steps, self._waited = now, 0, 0.0

    def take(self) -> dict[str, float]:
        """The seconds of each cause since the last call of `take`."""
        found = {cause: value for cause, value in self.seconds.items() if value}
        self.seconds.clear()
        return found


class Account:
    """Sums up the seconds by cause over all starts of a run, event by event; `steps` counts only
    steps whose work is part of the last state.

    Each line has the cost of the steps (from, to]. A later start or a rollback at step s makes the
    steps after s lost; a line that spans s is divided in proportion.
    """

    def __init__(self, events: Iterable[dict[str, Any]] = ()) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self._kept: list[tuple[int, int, float]] = []  # steps (from, to], seconds
        self._step = 0
        self._last: float | None = None  # when the time up to then has a cause
        for event in events:
            self.add(event)

    def add(self, event: dict[str, Any]) -> None:
        kind, seconds = event["event"], self.seconds
        # a boundary: of an older version (events.py)
        starts = kind == "start" or (kind == "boundary" and "began" in event)
        if starts:
            last = event["began"] if self._last is None else self._last
            seconds["down"] += max(0.0, event["began"] - last)
            self._last = event["began"]
        if starts or kind == "rollback":
            self._kept, lost = _cut(self._kept, event["step"])
            seconds["lost"] += lost
            seconds["steps"] = sum(made for _, _, made in self._kept)
            self._step = event["step"]
        if kind == "spent":
            made = event["seconds"].get("steps", 0.0)
            self._kept.append((min(self._step, event["step"]), event["step"], made))
            self._step = event["step"]
            for cause, value in event["seconds"].items():
                seconds[cause] += value
            self._last = (self._last or event["time"]) + sum(event["seconds"].values())
        if kind == "end" and event.get("state") == "finished":
            self._last = None  # if somebody raises train.steps later, nothing was down until then
        elif kind == "end" and self._last is None and self._step:  # not before the first start
            self._last = event["time"]


def _cut(
    kept: list[tuple[int, int, float]], step: int
) -> tuple[list[tuple[int, int, float]], float]:
    """Return the part of `kept` up to `step`, and the seconds of the rest."""
    before, lost = [], 0.0
    for begin, end, made in kept:
        share = 1.0 if end <= step else max(0, step - begin) / max(1, end - begin)
        if share:
            before.append((begin, min(end, step), made * share))
        lost += made * (1 - share)
    return before, lost
