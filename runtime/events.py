"""events.jsonl: what happened to a run, one JSON object a line, over all its starts. Lines are
added, never changed.

    start       a process began       step it starts from, world size, when the process was begun
    system      after each start      versions, device, layout
    memory      a rank's peak grew    step, the peaks of all ranks in bytes (metrics.py)
    spent       every logged step     seconds since the line before, by cause (ledger.py)
    checkpoint  a save ended          step, bytes, seconds; `failed` says why where it did
    rollback    the run went back     from_step, step, the samples it leaves out
    hang        a rank waited too long
    end         the process is done   state, reason

Each has `event` and `time` (seconds since 1970).
"""

import json
import time
from pathlib import Path
from typing import Any


def append_event(folder: str | Path, event: str, **about: Any) -> None:
    """Add a line, from one rank. If it cannot be written (a full disk), the run goes on."""
    line = json.dumps({"event": event, "time": time.time(), **about}) + "\n"
    try:
        with open(Path(folder) / "events.jsonl", "ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":  # a process was killed in the middle of a line
                    line = "\n" + line
            file.write(line.encode())
    except OSError:
        pass


def read_events(folder: str | Path) -> list[dict[str, Any]]:
    """All lines, in order, but for those that a killed process left unfinished."""
    events = []
    for line in (
        (Path(folder) / "events.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    ):
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return [
        event
        for event in events
        if isinstance(event, dict) and "event" in event and "time" in event
    ]
