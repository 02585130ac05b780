"""Where a run's time goes. Every second from its first start to its last line has one cause.

    steps       training
    lost        of it: steps made again after a failure or a rollback; waiting in a failed step
    data        waiting for the next batch
    evaluation  on held-out text
    saving      until what is saved was copied, and what is checked before
    rollback    finding and loading a checkpoint, in the middle of a run
    start       from the process's first line to its first step: imports, data, weights, checkpoint
    end         from the last step to the process's end: the last save
    down        from a start's last line to the next start: the steps since that line, noticing,
                starting processes

Rank 0 writes `spent` lines to events.jsonl as the run goes (Ledger); `account` sums them up. A
process that is killed takes the seconds since its last line with it, and they are found in `down`.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runtime import signals
from runtime.events import append_event

CAUSES = ("steps", "lost", "data", "evaluation", "saving", "rollback", "start", "end", "down")


class Ledger:
    """Rank 0's account of this process, from its first line on. Causes as above.

    Args:
        folder: the run's. step: that the run starts from. world_size: for the record.
    """

    def __init__(self, folder: Path, step: int, world_size: int) -> None:
        self.folder, self.counted_until = folder, signals.STARTED
        self.seconds: defaultdict[str, float] = defaultdict(float)
        began = time.time() - (time.monotonic() - signals.STARTED)
        append_event(folder, "start", began=began, step=step, world_size=world_size)

    def spent(self, cause: str, data_seconds: float = 0.0) -> None:
        """What passed since the last call belongs to `cause`, but for `data_seconds` of it."""
        now = time.monotonic()
        self.seconds[cause] += now - self.counted_until - data_seconds
        self.seconds["data"] += data_seconds
        self.counted_until = now

    def write(self, step: int) -> None:
        """A line of what was spent, up to the last call of `spent`; `step` steps are made."""
        seconds = {cause: value for cause, value in self.seconds.items() if value}
        append_event(self.folder, "spent", step=step, seconds=seconds)
        self.seconds.clear()


def account(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Seconds by cause, of all starts of a run; `steps`: those whose work is in its last state.

    A line says what steps (from, to] cost. A later start, or a rollback, at step s makes those
    beyond s lost: of a line that s cuts, in proportion.
    """
    seconds = dict.fromkeys(CAUSES, 0.0)
    kept: list[tuple[int, int, float]] = []  # steps (from, to], seconds
    step, last = 0, None
    for event in events:
        kind = event["event"]
        if kind == "start":
            seconds["down"] += max(0.0, event["began"] - last) if last is not None else 0.0
            last = event["began"]
        if kind in ("start", "rollback"):
            kept, lost = _cut(kept, event["step"])
            seconds["lost"] += lost
            step = event["step"]
        if kind == "spent":
            made = event["seconds"].get("steps", 0.0)
            kept.append((min(step, event["step"]), event["step"], made))
            step = event["step"]
            for cause, value in event["seconds"].items():
                seconds[cause] += value if cause != "steps" else 0.0
            last = (last or event["time"]) + sum(event["seconds"].values())
    seconds["steps"] = sum(made for _, _, made in kept)
    return seconds


def _cut(
    kept: list[tuple[int, int, float]], step: int
) -> tuple[list[tuple[int, int, float]], float]:
    """What of `kept` lies before `step`, and the seconds of what does not."""
    before, lost = [], 0.0
    for begin, end, made in kept:
        share = (
            1.0 if end <= step else max(0.0, (step - begin) / (end - begin)) if end > begin else 0.0
        )
        if share:
            before.append((begin, min(end, step), made * share))
        lost += made * (1 - share)
    return before, lost
