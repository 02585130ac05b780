"""status.json: how the last start of a run ended.

    {"state": "finished" | "requeue" | "failed", "step": …, "reason": …}

If slow ranks were named (health/slow_ranks.py), `slow` lists those that were slow at the end, and
if something was examined (health/examine.py), `suspicion` is the last verdict.

    the run ends or fails                  rank 0 writes it (metrics.py)
    it fails before its first step, or     rank 0 writes it (monitor/rank_0.py)
    between two data stages
    a step hangs                           rank 0's watchdog writes it
    a rank is killed                       the launcher writes it, if it is tools/launch.py
    rank 0 is killed, and the launcher     the file is missing; the next start records that in
    too, or the launcher is torchrun       events.jsonl

The file is removed when a start or one of its data stages begins to train. So it describes the last
start, unless that was refused, failed before it held the lease, or lost its rank 0 before it
began to train.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from runtime import signals
from runtime.log.events import append_event, changes_data_stage, read_events
from runtime.log.log_lines import content, is_count, json_object
from runtime.messages import LOST, log


def write_status(folder: Path, state: str, step: int, reason: str, **about: Any) -> None:
    """Record how this start ended, in status.json and as an event; called by only one process."""
    append_event(folder, "end", state=state, step=step, reason=reason)
    status = {"state": state, "step": step, "reason": reason, **about}
    write_whole(folder / "status.json", json.dumps(status) + "\n")


def read_status(folder: Path) -> dict[str, Any]:
    """Return the content of status.json; empty if it is missing, unreadable or not whole."""
    status = json_object(content(folder / "status.json"))
    texts = (status.get("state"), status.get("reason"))
    is_whole = is_count(status.get("step")) and all(isinstance(text, str) for text in texts)
    return status if is_whole else {}


def record_failure(folder: Path, reason: str) -> str:
    """Record the launcher's reason for a failed start, and return the reason that is recorded in
    the end. A reason that rank 0 has written is kept, unless it is only a lost connection."""
    last = _last_start(folder)
    launched = time.time() - (time.monotonic() - signals.STARTED)
    if last is None or max(last["began"], last["ended_at"]) < launched - 1:
        return reason  # this start failed before it wrote anything
    status = read_status(folder)
    theirs = status.get("reason", "")
    if status and LOST not in theirs:
        return theirs
    write_status(folder, "failed", status.get("step", last["step"]), reason)
    return reason


def record_failed_start(folder: Path, reason: str) -> None:
    """Record that this start failed before its first step."""
    last = _last_start(folder)
    _note_missing_end(folder, last)
    write_status(folder, "failed", last["step"] if last else 0, reason)


def record_missing_end(folder: Path) -> list[str]:
    """If the previous start recorded no end, record that as an event; called at the next start.
    Returns at most one line for the log."""
    return _note_missing_end(folder, _last_start(folder))


def _note_missing_end(folder: Path, last: dict[str, Any] | None) -> list[str]:
    if last is None or last["ended"]:
        return []
    reason = "it recorded no end, so it was killed or its machine died (noted by the next start)"
    append_event(folder, "end", state="failed", step=last["step"], reason=reason, noted_later=True)
    return [
        f"the previous start was last recorded at step {last['step']}: {reason.partition(' (')[0]}"
    ]


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically; log a warning if that fails."""
    try:
        path.with_suffix(".partial").write_text(text, encoding="utf-8")
        os.replace(path.with_suffix(".partial"), path)
    except OSError as failure:
        log(f"warning: {path} cannot be written: {failure}")


def _last_start(folder: Path) -> dict[str, Any] | None:
    """Return from events.jsonl when the last start began, its last recorded step, whether it
    recorded its end, and when a start did so last; None if there is neither a start nor an end."""
    last: dict[str, Any] | None = None
    ended_at = -math.inf
    for event in read_events(folder):
        if event["event"] == "start":
            last = {"began": event["began"], "step": event["step"], "ended": False}
        elif event["event"] == "end":  # also of a start that failed before its first step
            last = last or {"began": -math.inf, "step": event["step"]}
            last["ended"] = not changes_data_stage(event)
            ended_at = ended_at if event.get("noted_later") else event["time"]
        elif last is not None and event["event"] in ("spent", "rollback"):
            last["step"] = event["step"]
    return last and last | {"ended_at": ended_at}
