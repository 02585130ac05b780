"""Reads a run folder for the report, and what saves, restarts and steps took.

The run may be in progress, may have been killed in the middle of writing a line, or may not have
reached its first step. Anything missing or unreadable is treated as empty.
"""

import contextlib
import math
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from errors import UserError
from hardware import FAILURES_PER_GPU_DAY
from runtime.checkpoint.save_interval import best_interval, mtbf_of
from runtime.log.events import read_events
from runtime.log.ledger import Account
from runtime.log.log_lines import content, is_number, read_records
from runtime.log.status import read_status
from tools.command import duration

Points = list[tuple[float, float]]
Event = dict[str, Any]
FILES = ("config.yaml", "metrics.jsonl", "events.jsonl")  # a run folder has at least one of them


@dataclass(frozen=True)
class Run:
    """One run, over all its starts."""

    name: str
    config_text: str
    status: dict[str, Any]  # status.json
    records: list[dict[str, Any]]  # metrics.jsonl
    events: list[Event]  # events.jsonl
    seconds: dict[str, float]  # by cause (runtime/log/ledger.py)

    def points(self, key: str, scale: float = 1.0) -> Points:
        """(step, value) of every record whose value can be drawn on an axis, sorted by step."""
        found = ((record["step"], record.get(key)) for record in self.records)
        return sorted((x, y * scale) for x, y in found if is_number(y) and abs(y) < 1e100)

    @property
    def goodput(self) -> list[str]:
        """Sentences about saving and restarting; none if no time was measured."""
        rate: Any = None
        with contextlib.suppress(yaml.YAMLError, TypeError, KeyError):  # it may be an older run's
            rate = yaml.safe_load(self.config_text)["checkpoint"]["failures_per_gpu_day"]
        rate = rate if is_number(rate) else FAILURES_PER_GPU_DAY
        return goodput(self.events, rate) if any(self.seconds.values()) else []


def read_run(folder: Path) -> Run:
    """Reads a run folder. Raises UserError if `folder` is not one."""
    if not any(os.path.isfile(folder / name) for name in FILES):
        why = f"it has none of {', '.join(FILES)}"
        raise UserError("RUN", str(folder), why, "give a run folder (run.dir)")
    events = read_events(folder)
    text = content(folder / "config.yaml").decode("utf-8", errors="replace")
    records, status = read_records(folder), read_status(folder)
    return Run(folder.resolve().name, text, status, records, events, Account(events).seconds)


def goodput(events: list[Event], failures_per_gpu_day: float) -> list[str]:
    """Sentences about saving and restarting. There is a best interval, √(2sM), where saves and
    steps were measured, and something fails."""
    seconds = Account(events).seconds
    tried = [event for event in events if event["event"] == "checkpoint"]
    saves = [event for event in tried if "failed" not in event]
    starts = [event for event in events if event["event"] == "start"]
    step_time, steps, at = 0.0, 0, 0
    failures, has_end = 0, True  # whether the last start has one
    for event in events:
        kind = event["event"]
        if kind == "spent":  # steps that are repeated count again
            step_time += event["seconds"].get("steps", 0.0)
            steps += max(0, event["step"] - at)
        if kind in ("start", "rollback", "spent"):
            at = event["step"]
        if kind == "start":
            failures, has_end = failures + (not has_end), False
        elif kind == "end":  # a start that failed before its first step has only this
            is_planned = event.get("state") in ("requeue", "finished")
            failures, has_end = failures + (not is_planned), True
    effective = seconds["steps"] / (sum(seconds.values()) or 1.0)
    lines, took = [f"effective training time {effective:.1%}; {failures} failures"], []
    if saves:
        # the ledger has the host's wait, with the checks; a GPU may copy for longer
        stall = statistics.median(float(save["stall_seconds"]) for save in saves)
        cost = max(seconds["saving"] / len(tried), stall)
        written = statistics.median(float(save["write_seconds"]) for save in saves)
        took += [f"a save {duration(cost)}", f"its writing {duration(written)}"]
        mtbf = mtbf_of(failures_per_gpu_day, starts[-1]["world_size"] if starts else 1)
        if cost and steps and step_time and not math.isinf(mtbf):
            best = best_interval(cost, mtbf)
            lines.append(
                f"best interval between saves: {max(1, round(best * steps / step_time)):,} steps "
                f"({best:,.1f} s), because a save cost {cost:.3g} s and {failures_per_gpu_day:.3g} "
                "failures are expected per GPU and day"
            )
    # each data stage starts too; a start that fails in its first step counts, as its seconds do
    begun = sum("start" in event["seconds"] for event in events if event["event"] == "spent")
    took += [f"a start {duration(seconds['start'] / begun)}"] if begun else []
    return lines + ["measured: " + ", ".join(took)] * bool(took)
