"""events.jsonl: what happened to a run, one JSON object per line, over all its starts. Lines are
added, never changed.

    event       written when              content besides `event` and `time` (seconds since 1970)
    start       a start begins            step, the `checkpoint` it resumes (of this run: its name),
                                          world size, when rank 0 was started
    system      a start, or a data stage, versions, device, layout
                begins
    started     … its first step is done  step, seconds by part (start/timing.py)
    spares      a start begins            step, number of spare ranks by node (start/elastic.py)
    spent       a step is logged          step, seconds since the line before, by cause (ledger.py)
    checkpoint  a save ends               step, bytes, seconds; or, if it failed, why (`failed`)
    interval    checkpoint.interval=auto  steps, save_seconds, mtbf (checkpoint/save_interval.py)
                changes
    rollback    the run goes back         from_step, step, the samples that it leaves out
    data_stage  a data stage begins       its number, step, what changes (start/announce.py)
    spike       updates were skipped      step, how many (`skipped`), loss, grad_norm of that step
    hang        a step takes too long     step, where rank 0 waits
    slow_rank   a rank is slow, or no     step, rank, node, factor, since (a step); `ended` if it no
                longer is                 longer is (health/slow_ranks.py)
    examining   an examination begins     step, cause
    suspicion   … and ends                step, cause, verdict, why, num_ranks; ranks and nodes, at
                                          most 20 of each (health/examine.py)
    end         a start ends, only once   state, step, reason; `noted_later` if the next start has
                (status.py)               noted it

The monitor of rank 0 (monitor/) writes, too, and `end` where nobody else has:

    stalled     no step is logged         the last step, seconds since it was logged, what rank 0
                                          does meanwhile (`busy`)
    resumed     … and then one is         step, seconds without one
    died        rank 0 recorded no end    step, reason
    refused     a start was refused       reason
    undelivered an alarm was lost         its text, the event that it was about, why
    after_commit  the command was run     step, attempts, seconds; or, if it failed, why (`failed`)

Readers get only whole events (log_lines.py): those with every entry of FIELDS. They may rely on no
other.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.log.log_lines import content, is_count, is_number, whole_lines
from runtime.output import log

# what an examination finds (health/examine.py)
TRANSIENT, PERSISTENT, REPRODUCIBLE, NOT_EXAMINED = VERDICTS = (
    *("transient", "persistent", "reproducible", "not examined"),
)
# what the ledger tells apart (ledger.py)
CAUSES = (
    *("steps", "lost", "data", "evaluation", "saving", "examination", "rollback", "start", "end"),
    "down",
)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values())) and {*value} <= {*CAUSES}


# Event → entry → what it must be. Others, and events of other kinds, may be anything.
FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "start": {"step": is_count, "began": is_number, "world_size": is_count},
    "spent": {"step": is_count, "seconds": _is_seconds},
    "checkpoint": {
        "step": is_count,
        **dict.fromkeys(("bytes", "stall_seconds", "write_seconds"), is_number),
    },
    "checkpoint, failed": {"step": is_count},
    "rollback": {"step": is_count},
    "end": {"step": is_count},
}


def is_whole_event(found: dict[str, Any]) -> bool:
    kind = found.get("event")
    if not isinstance(kind, str) or not is_number(found.get("time")):
        return False
    is_failed_save = kind == "checkpoint" and "failed" in found
    fields = FIELDS.get("checkpoint, failed" if is_failed_save else kind, {})
    return all(name in found and is_right(found[name]) for name, is_right in fields.items())


def append_event(folder: str | Path, event: str, **about: Any) -> dict[str, Any]:
    """Add a line, and return it; called by only one rank (RunLog), and by its monitor. If it cannot
    be written (a full disk), the run continues, after a warning."""
    whole = {"event": event, "time": time.time(), **about}
    assert is_whole_event(whole), whole
    line = json.dumps(whole) + "\n"
    try:
        with open(Path(folder) / "events.jsonl", "ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":  # a process was killed in the middle of a line
                    line = "\n" + line
            file.write(line.encode())
    except OSError as error:
        if event != "spent":  # one a logged step
            log(f"warning: the event {event} was not recorded: {error}")
    return whole


def named_as_today(event: dict[str, Any]) -> dict[str, Any]:
    """An event of any version. Older ones called a data stage a stage, and where one follows
    another they wrote an end and a start, each with the number of the one that begins: these are a
    `boundary` here, which only the ledger reads."""
    if event["event"] not in ("start", "end", "stage"):
        return event
    named = {"data_stage" if name == "stage" else name: value for name, value in event.items()}
    kind = event["event"].replace("stage", "data_stage")
    return named | {"event": "boundary" if kind != "data_stage" and "data_stage" in named else kind}


def read_events(folder: str | Path, until: int | None = None) -> list[dict[str, Any]]:
    """Read all whole events in order, or those in the first `until` bytes."""
    path = Path(folder) / "events.jsonl"
    whole = whole_lines(path, content(path)[:until], is_whole_event)
    return [named_as_today(event) for event in whole]
