"""What saves, restarts and steps took in a run, and how often it should have saved: read from its
events.jsonl."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from runtime.checkpoint.save_interval import best_interval, mtbf_of
from runtime.log.ledger import account
from tools.command import duration


@dataclass(frozen=True)
class Measured:
    """The averages of one run, in seconds; None where it has nothing to measure."""

    world_size: int
    failures: int  # starts that had to repeat steps, or followed a start without a planned end
    seconds: float  # from the first start's first line to the last line
    effective: float  # share of the seconds: steps that led to the last state
    step: float | None
    interval: float | None  # of training between two saves: the median
    save: float | None
    commit: float | None
    restart: float | None  # without a planned stop's waiting in a queue

    def best_interval(self, failures_per_gpu_day: float) -> tuple[float, int] | None:
        """√(2sM) in seconds and in steps, at least one; None if saves or steps were not measured,
        or nothing fails."""
        mtbf = mtbf_of(failures_per_gpu_day, self.world_size)
        if not self.save or not self.step or math.isinf(mtbf):
            return None
        seconds = best_interval(self.save, mtbf)
        return seconds, max(1, round(seconds / self.step))

    def in_words(self, failures_per_gpu_day: float) -> list[str]:
        """Sentences below the ledger's table."""
        lines = [f"effective training time {self.effective:.1%}; {self.failures} failures"]
        best = self.best_interval(failures_per_gpu_day)
        if best is not None:
            seconds, steps = best
            lines.append(
                f"best interval between saves: {steps:,} steps ({seconds:,.1f} s), because a save "
                f"cost {self.save:.3g} s and {failures_per_gpu_day:.3g} failures are expected per "
                "GPU and day"
            )
        took = {
            "a save": self.save,
            "its writing": self.commit,
            "training between saves": self.interval,
            "a restart after a failure": self.restart,
        }
        said = [f"{what} {duration(value)}" for what, value in took.items() if value is not None]
        return lines + ["measured: " + ", ".join(said)] * bool(said)


def measure(events: list[dict[str, Any]]) -> Measured:
    seconds = account(events)
    saves = [e for e in events if e["event"] == "checkpoint" and "failed" not in e]
    total = sum(seconds.values())
    made = sum(spent["seconds"].get("steps", 0.0) for spent in events if spent["event"] == "spent")
    step = made / number if (number := _steps_made(events)) else None
    between, downs = _steps_between_saves(events), _restarts(events)
    starts = [event for event in events if event["event"] == "start"]
    return Measured(
        world_size=starts[-1]["world_size"] if starts else 1,
        failures=len(downs),
        seconds=total,
        effective=seconds["steps"] / total if total else 1.0,
        step=step,
        interval=statistics.median(between) * step if between and step else None,
        # what the ledger counts: the checks before a save, and the wait for the copy
        save=seconds["saving"] / len(saves) if saves else None,
        commit=statistics.median(float(save["write_seconds"]) for save in saves) if saves else None,
        restart=statistics.fmean(downs) if downs else None,
    )


def _steps_made(events: list[dict[str, Any]]) -> int:
    """Steps made, with those that were repeated."""
    made, at = 0, 0
    for event in events:
        if event["event"] in ("start", "rollback"):
            at = event["step"]
        elif event["event"] == "spent":
            made, at = made + max(0, event["step"] - at), event["step"]
    return made


def _steps_between_saves(events: list[dict[str, Any]]) -> list[int]:
    between, last = [], None
    for event in events:
        if event["event"] in ("start", "rollback"):
            last = event["step"]
        elif event["event"] == "checkpoint" and "failed" not in event:
            if last is not None and event["step"] > last:
                between.append(event["step"] - last)
            last = event["step"]
    return between


def _restarts(events: list[dict[str, Any]]) -> list[float]:
    """For each start after a failure, the seconds from the last line before until its first step
    begins. (The steps since that line are in it, as in the ledger's `down`.)"""
    found: list[float] = []
    last_time, planned, waiting, runs = None, True, None, False
    for event in events:
        kind = event["event"]
        if kind == "start":
            waiting = None if planned else last_time
            if planned:  # the wait in a queue before it is no restart, even if it fails at once
                last_time = event["began"]
            planned, runs = False, True
        elif kind == "end" and runs:  # else of a start that failed before its first step
            planned, runs = event.get("state") in ("requeue", "finished"), False
        elif kind == "spent" and waiting is not None and event["seconds"].get("start"):
            steps = sum(v for cause, v in event["seconds"].items() if cause != "start")
            found.append(max(0.0, event["time"] - steps - waiting))
            waiting = None
        # `failed` is written when a rank notices the failure, or by the next start
        if kind in ("spent", "checkpoint") or (kind == "end" and planned):
            last_time = event["time"]
    return found
