"""How the last start of a run ended: status.json.

    {"state": "finished" | "requeue" | "failed", "step": …, "reason": …}

    the run ends, or fails                        rank 0 writes it (metrics.py)
    it hangs                                      rank 0's watchdog
    rank 0 is killed, or another rank is          the launcher, where it is ours (tools/launch.py)
    rank 0 is killed, and nobody of ours is left  none is there; the next start records in
                                                  events.jsonl that it is missing

It is removed when a start begins to train, so what is there belongs to the last one.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from runtime import signals
from runtime.events import append_event, read_events
from runtime.messages import LOST, log


def write_status(folder: Path, state: str, step: int, reason: str) -> None:
    """How this start ended, in status.json and as an event. From one process."""
    append_event(folder, "end", state=state, step=step, reason=reason)
    write_whole(
        folder / "status.json", json.dumps({"state": state, "step": step, "reason": reason}) + "\n"
    )


def read_status(folder: Path) -> dict[str, Any]:
    """What status.json says; nothing where it is missing."""
    try:
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def record_failure(folder: Path, reason: str) -> str:
    """The launcher's word on the start that it began, of which a rank has ended badly. What rank 0
    has written is better, unless it is only that it lost that rank. Returns the reason that
    stands."""
    last = _last_start(folder)
    launched = time.time() - (time.monotonic() - signals.STARTED)
    if last is None or last["began"] < launched - 1:
        return reason  # it ended before it wrote anything
    status = read_status(folder)
    theirs = str(status.get("reason", ""))
    if status and LOST not in theirs:
        return theirs
    write_status(folder, "failed", int(status.get("step", last["step"])), reason)
    return reason


def record_missing_end(folder: Path) -> list[str]:
    """At the next start: whether the one before left word of its end. If not, an event says so, and
    a line, returned."""
    last = _last_start(folder)
    if last is None or last["ended"]:
        return []
    reason = "it left no word of its end: killed, or its machine died (noted by the next start)"
    append_event(folder, "end", state="failed", step=last["step"], reason=reason)
    return [
        f"the start before was last heard of at step {last['step']}, "
        f"and {reason.partition(' (')[0]}"
    ]


def write_whole(path: Path, text: str) -> None:
    """All of a file or nothing of it; a warning where that cannot be."""
    try:
        path.with_suffix(".partial").write_text(text, encoding="utf-8")
        os.replace(path.with_suffix(".partial"), path)
    except OSError as failure:
        log(f"warning: {path} cannot be written: {failure}")


def _last_start(folder: Path) -> dict[str, Any] | None:
    """When the last start began, how far its lines say it came, whether it told of its end."""
    try:
        events = read_events(folder)
    except OSError:
        return None
    last: dict[str, Any] | None = None
    for event in events:
        if event["event"] == "start":
            last = {"began": event["began"], "step": event["step"], "ended": False}
        elif last is not None and event["event"] in ("spent", "rollback"):
            last["step"] = event["step"]
        elif last is not None and event["event"] == "end":
            last["ended"] = True
    return last
