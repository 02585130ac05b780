"""The rows of the report page's tables. The page (page.html) escapes what is in them."""

from datetime import UTC, datetime
from typing import Any

from hardware import FAILURES_PER_GPU_DAY
from runtime.log.log_lines import is_number
from runtime.monitor.alarms import words
from runtime.start.timing import PARTS
from tools.command import duration
from tools.report.charts import GIB, short
from tools.report.run import Run
from tools.timeline.draw import COLOURS

MEANING = {
    "steps": "steps",
    "lost": "failed and repeated steps",
    "data": "waiting for data",
    "evaluation": "evaluation",
    "saving": "saving: copy, check",
    "examination": "examining a suspicion",
    "rollback": "rollback",
    "start": "starting",
    "end": "ending",
    "down": "down",
}
MOST_ROWS = 200  # the most events shown: the newest ones
MOST_STEPS = 20  # the most steps listed for skipped updates: the last ones
MOST_STARTS = 20  # the newest ones
# events shown in other parts of the page, or by what follows them
ELSEWHERE = ("spent", "memory", "system", "started", "examining", "boundary")
# entries that words() leaves out, and what they are called
DETAILS = {
    "rollback": {"left_out": "samples left out (begin, end)"},
    "suspicion": {"ranks": "ranks", "nodes": "nodes"},
}


def head(run: Run) -> tuple[str, str, list[str]]:
    """The run's state, the reason, and the system on which it runs."""
    system, start = run.last("system"), run.last("start")
    about = []
    if is_number(system.get("parameters")):
        about.append(f"{system['parameters']:,} parameters on {system.get('layout', '')}")
    elif start:
        about.append(f"{start.get('world_size', '?')} ranks")
    about += [str(system["device"])] if "device" in system else []
    about += [f"{name} {system[name]}" for name in ("torch", "python") if name in system]
    # status.json is written at the end of a start, and removed at the beginning of the next
    if state := str(run.status.get("state", "")):
        return state, str(run.status.get("reason", "")), about
    if run.events:
        last = max(event["time"] for event in run.events)
        return "running, or killed", f"last line at {clock(last)} UTC", about
    return "running, or killed" if run.records else "nothing yet", "", about


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """The name, newest value and unit of the run's main numbers."""
    steps = run.setting("train", "steps")
    forms = {
        "step": ("step", lambda v: f"{v:,.0f}", f" of {steps:,}" if steps else ""),
        "loss": ("loss", lambda v: f"{v:.4f}", ""),
        "eval_loss": ("held-out loss", lambda v: f"{v:.4f}", ""),
        "tokens": ("tokens", short, ""),
        "tokens_per_second": ("tokens per second", lambda v: f"{v:,.0f}", ""),
        "mfu": ("MFU", lambda v: f"{v:.1%}", ""),
        "peak_memory_bytes": ("peak memory", lambda v: f"{v / GIB:.2f}", " GiB"),
    }
    found = [
        (name, form(value), unit)
        for key, (name, form, unit) in forms.items()
        if (value := run.newest(key)) is not None
    ]
    if run.measured.seconds:
        found.append(("effective time", f"{run.measured.effective:.1%}", ""))
    return found


def ledger(run: Run) -> list[tuple[str, str, str, str]]:
    """Cause, colour, duration and share of the run's seconds."""
    total = sum(run.seconds.values())
    return [
        (MEANING[cause], colour, duration(seconds), f"{seconds / total:.1%}")
        for colour, (cause, seconds) in zip(COLOURS, run.seconds.items(), strict=False)
        if seconds > 0
    ]


def goodput(run: Run) -> list[str]:
    """Sentences about saving and restarting; none if no time was measured."""
    rate = run.setting("checkpoint", "failures_per_gpu_day")  # a run may be older than the key
    rate = FAILURES_PER_GPU_DAY if rate is None else rate
    return run.measured.in_words(rate) if run.measured.seconds else []


def starts(run: Run) -> list[list[str]]:
    """The newest starts: the step, and the seconds of each part (runtime/start/timing.py)."""
    started = [event for event in run.events if event["event"] == "started"]
    rows = []
    for event in started[-MOST_STARTS:]:
        if isinstance(seconds := event.get("seconds"), dict):
            parts = (seconds.get(part) for part in PARTS)
            cells = [f"{value:.2f}" if is_number(value) else "" for value in parts]
            rows.append([str(event.get("step", "")), *cells])
    return rows


def experts(run: Run) -> tuple[Any, list[list[str]]]:
    """The newest step that has the load of experts (runtime/metrics/expert_load.py), and a row for
    each layer; no rows if no run has written them."""
    forms = {"layer": ".0f", "entropy": ".3f", "largest_share": ".2f", "dead": ".0f"}
    for record in reversed(run.records):
        by_layer = record.get("experts_by_layer")
        columns = [by_layer.get(key) for key in forms] if isinstance(by_layer, dict) else [None]
        if all(isinstance(column, list) for column in columns):
            rows = [row for row in zip(*columns, strict=False) if all(map(is_number, row))]
            if rows:
                return record["step"], [list(map(format, row, forms.values())) for row in rows]
    return "", []


def events(run: Run) -> list[tuple[str, str, str, str]]:
    """Time, kind, step and words of starts, ends, rollbacks, hangs and failed saves, by time."""
    rows = []
    for event in sorted(run.events, key=lambda event: event["time"]):
        kind, is_saved = event["event"], "failed" not in event
        if kind in ELSEWHERE or (kind == "checkpoint" and is_saved):
            continue
        step = f"{event['step']:,}" if is_number(event.get("step")) else ""
        known = DETAILS.get(kind, {}).items()
        more = [f"{called} {event[name]}" for name, called in known if event.get(name)]
        rows.append((clock(event["time"]), kind, step, ", ".join([words(event), *more])))
    return rows


def happened(run: Run, shown: int) -> list[str]:
    """Sentences above the table of events: successful saves, and skipped updates."""
    saved = sum(event["event"] == "checkpoint" and "failed" not in event for event in run.events)
    committed = f"{saved:,} checkpoint{'s were' if saved != 1 else ' was'} committed."
    newest = f"The newest {MOST_ROWS} of {shown:,} lines:"
    said = [committed] if run.events else []
    return said + skipped_updates(run) + ([newest] if shown > MOST_ROWS else [])


def skipped_updates(run: Run) -> list[str]:
    """A sentence with the number of skipped updates and the logged steps that reported them; empty
    if there are none."""
    before, heard = 0.0, []
    for step, skipped in run.points("skipped_updates"):
        if skipped > before:
            heard.append(f"{step:,.0f}")
        before = skipped
    if not heard:
        return []
    steps = f"{'… ' if len(heard) > MOST_STEPS else ''}{', '.join(heard[-MOST_STEPS:])}"
    return [
        f"The updates of {before:,.0f} step{'s' if before != 1 else ''} were skipped; "
        f"this was logged at step {steps}."
    ]


def clock(seconds: float) -> str:
    """Formats seconds since 1970 as UTC."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return "?"
