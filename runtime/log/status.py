"""How the starts of a run ended: the last one in status.json, each in an event `end`.

    {"state": "finished" | "requeue" | "failed", "step": …, "reason": …}

If slow ranks were named (health/slow_ranks.py), `slow` lists those that were slow at the end, and
if something was examined (health/examine.py), `suspicion` is the last verdict.

    what happens                           who writes the event and the file
    the run ends or fails, a step hangs    rank 0 (run_log.py); the first of its threads that knows
    rank 0 is killed                       the launcher, if it is tools/launch.py, writes both;
                                           if there is a monitor, and it is first, it writes the
                                           event, and the launcher only the file
    and there is neither                   the next start writes the event; there is no file

The file is removed when a start begins to train. So it describes the last start, unless that was
refused, failed before it held the lease, or lost its rank 0 before it began to train.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from errors import LOST
from runtime.files import locked, write_or_warn
from runtime.log.events import append_event, read_events
from runtime.log.log_lines import content, is_count, json_object

LOCK_SECONDS = 5.0  # to wait for another process, which may be stopped, to record the same end


def end_start(
    folder: Path, start: Mapping[str, Any], state: str, step: int, reason: str, **about: Any
) -> dict[str, Any] | None:
    """Record the end of a start, unless it has one: of one start, there is never a second. Every
    process that may know how a start ended calls it: rank 0, its monitor, the launcher, the next
    start.

    start: its event.

    Returns: the event; None if there was one.
    """
    with locked(folder / "events.jsonl", LOCK_SECONDS):
        # not by `began`: processes that were forked from the same began at the same time
        own = next((one for one in starts_of(folder) if one["time"] == start["time"]), None)
        if own is not None and own["ended"]:  # without `own`, its event could not be written
            return None
        return append_event(folder, "end", state=state, step=step, reason=reason, **about)


def record_failure(folder: Path, reason: str, launched: float) -> str:
    """Record the launcher's reason for a failed start, and return the reason that is recorded in
    the end. A reason that rank 0 has written is kept, unless it is only a lost connection.

    launched: when the ranks were started (time.time).
    """
    launched, starts = launched - 1, starts_of(folder)
    own = [one for one in starts if one["time"] >= launched]
    if own:
        end_start(folder, own[0], "failed", own[0]["step"], reason)
    elif not starts or starts[-1]["ended_at"] < launched:
        return reason  # it failed before it wrote anything
    if own[1:]:
        return reason  # the next one has begun, and status.json is about that
    status = read_status(folder)
    theirs = status.get("reason", "")
    if status and LOST not in theirs:
        return theirs
    write_status(folder, "failed", status.get("step", starts[-1]["step"]), reason)
    return reason


def record_missing_end(folder: Path) -> dict[str, Any] | None:
    """If the previous start recorded no end, record that as an event, and return it; called by the
    next start."""
    last = next(reversed(starts_of(folder)), None)
    if last is None or last["ended"]:
        return None
    reason = "it recorded no end, so it was killed or its machine died (noted by the next start)"
    return end_start(folder, last, "failed", last["step"], reason, noted_later=True)


def starts_of(folder: Path) -> list[dict[str, Any]]:
    """The starts in events.jsonl: the time of its event, its last recorded step, whether its end
    is recorded, and when an end was recorded after it last (also by a start that failed before its
    first step, and so has no event of its own)."""
    found: list[dict[str, Any]] = []
    for event in read_events(folder):
        kind = event["event"]
        if kind == "start":
            found.append({"time": event["time"], "ended": False, "ended_at": -math.inf})
        elif kind == "end":
            found = found or [{"time": -math.inf, "step": event["step"]}]
            found[-1]["ended"] = True
            found[-1]["ended_at"] = -math.inf if event.get("noted_later") else event["time"]
        if found and kind in ("start", "spent", "rollback"):
            found[-1]["step"] = event["step"]
    return found


def write_status(folder: Path, state: str, step: int, reason: str, **about: Any) -> None:
    """Replace status.json."""
    status = {"state": state, "step": step, "reason": reason, **about}
    write_or_warn(folder / "status.json", json.dumps(status) + "\n")


def read_status(folder: Path) -> dict[str, Any]:
    """Return the content of status.json; empty if it is missing, unreadable or not whole."""
    status = json_object(content(folder / "status.json"))
    texts = (status.get("state"), status.get("reason"))
    is_whole = is_count(status.get("step")) and all(isinstance(text, str) for text in texts)
    return status if is_whole else {}
