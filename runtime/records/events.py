"""events.jsonl: what happened to a run, one JSON object per line, over all its starts. Lines are
added, never changed.

    event       written when              content besides `event` and `time` (seconds since 1970)
    start       a start begins            step it starts from, world size, when rank 0 was started;
                                          `stage` if the process goes on from the stage before
    started     the first step is done    step, seconds by part (start/parts.py)
    system      a start begins            versions, device, layout
    spares      a start begins            step, number of spare ranks by node (start/spares.py)
    memory      a rank's peak has grown   step, the peaks of all ranks in bytes (metrics.py)
    spent       a step is logged          step, seconds since the line before, by cause (ledger.py)
    checkpoint  a save ends               step, bytes, seconds; or, if it failed, why (`failed`)
    interval    checkpoint.interval=auto  steps, save_seconds, mtbf (checkpoints/save_interval.py)
                changes
    rollback    the run goes back         from_step, step, the samples that it leaves out; of
                                          earlier stages: left_out_before (stage, begin, end)
    stage       a stage begins            its number, step, what changes (next_stage.py)
    spike       updates were skipped      step, how many (`skipped`), loss, grad_norm of that step
    hang        a step takes too long     step, where rank 0 waits
    slow_rank   a rank is slow, or no     step, rank, node, factor, since (a step); `ended` if it no
                longer is                 longer is (health/slow_ranks.py)
    examining   an examination begins     step, cause
    suspicion   … and ends                step, cause, verdict, ranks, nodes, why
                                          (health/examine.py)
    end         a start ends              state, step, reason; `stage` if the process goes on with
                                          this one; `noted_later` if the next start has noted it

The companion of rank 0 (alerts/) writes, too:

    stalled     no step is logged         the last step, seconds since it was logged, what rank 0
                                          does meanwhile (`busy`)
    resumed     … and then one is         step, seconds without one
    died        rank 0 recorded no end    step, reason
    refused     a start was refused       reason
    undelivered an alarm was lost         its text, the event that it was about, why
    after_commit  the command was run     step, attempts, seconds; or, if it failed, why (`failed`)
"""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any


def append_event(folder: str | Path, event: str, **about: Any) -> None:
    """Add a line; called by only one rank, and by its companion. If it cannot be written (a full
    disk), the run continues, after a warning: no alarm is sent of this event."""
    line = json.dumps({"event": event, "time": time.time(), **about}) + "\n"
    try:
        with open(Path(folder) / "events.jsonl", "ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":  # a process was killed in the middle of a line
                    line = "\n" + line
            file.write(line.encode())
    except OSError as error:
        if event != "spent":  # one a logged step
            with contextlib.suppress(OSError):  # not `log` (messages.py), which imports torch
                sys.stderr.write(f"warning: the event {event} was not recorded: {error}\n")


def changes_stage(event: dict[str, Any]) -> bool:
    """Whether a start or an end is only that of a stage (next_stage.py)."""
    return event["event"] in ("start", "end") and "stage" in event


def read_events(folder: str | Path) -> list[dict[str, Any]]:
    """Read all events in order, without lines that a killed process left unfinished."""
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
