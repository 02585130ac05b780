"""One self-contained HTML page about a run, from what run.py has read and the template page.html.

The template escapes what a run's files contain. The page's Content-Security-Policy forbids the
browser to run any script, and to load anything.
"""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runtime.log.log_lines import is_number
from runtime.monitor.alarms import words
from tools.command import duration
from tools.report.charts import BINS, NARROW, WIDE, charts, draw
from tools.report.run import Run
from tools.timeline.draw import COLOURS, inline

MOST_EVENTS = 200  # that are shown: the newest
# events that are no news, or shown in other parts of the page, or by what follows them
ELSEWHERE = ("spent", "memory", "system", "started", "examining", "boundary")


def page(run: Run) -> str:
    """The whole HTML document."""
    import jinja2

    # each: title, what is beside it, and the picture
    pictures = []
    for chart in charts(run):
        size = WIDE if chart.title == "Loss" else NARROW
        pictures.append((chart.title, chart.unit, inline(draw(chart, size))))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("page.html").render(
        run=run,
        head=head(run),
        newest=newest(run),
        pictures=pictures,
        bins=BINS,
        ledger=ledger(run),
        duration=duration,
        events=events(run),
        most_events=MOST_EVENTS,
        now=clock(time.time()),
    )


def head(run: Run) -> tuple[str, str, list[str]]:
    """The run's state, the reason, and the system on which it runs."""
    systems = [event for event in run.events if event["event"] == "system"]
    system, about = systems[-1] if systems else {}, []
    if is_number(system.get("parameters")):
        about.append(f"{system['parameters']:,} parameters on {system.get('layout', '')}")
    about += [f"{name} {system[name]}" for name in ("device", "torch", "python") if name in system]
    # status.json is written at the end of a start, and removed at the beginning of the next
    if state := str(run.status.get("state", "")):
        return state, str(run.status.get("reason", "")), about
    last = max((event["time"] for event in run.events), default=None)
    reason = "" if last is None else f"last line at {clock(last)} UTC"
    return "running, or killed" if run.events or run.records else "nothing yet", reason, about


def newest(run: Run) -> dict[str, str]:
    """Every number of metrics.jsonl, as last logged."""
    logged = (entry for record in run.records for entry in record.items())
    numbers = {name: value for name, value in logged if is_number(value, finite=False)}
    shown = {n: f"{v:,}" if isinstance(v, int) else f"{v:,.6g}" for n, v in numbers.items()}
    if peak := numbers.get("peak_memory_bytes"):
        shown["peak_memory_bytes"] = f"{peak / 2**30:.2f} GiB"
    return shown


def ledger(run: Run) -> list[tuple[str, str, str, str]]:
    """Cause, colour, duration and share of the run's seconds."""
    total = sum(run.seconds.values())
    return [
        (cause, colour, duration(seconds), f"{seconds / total:.1%}")
        for colour, (cause, seconds) in zip(COLOURS, run.seconds.items(), strict=False)
        if seconds > 0
    ]


def events(run: Run) -> list[tuple[str, str, Any, str]]:
    """Time, kind, step and words of starts, ends, rollbacks, hangs and failed saves, by time."""
    rows = []
    for event in sorted(run.events, key=lambda event: event["time"]):
        kind = event["event"]
        if kind in ELSEWHERE or (kind == "checkpoint" and "failed" not in event):
            continue
        # what the words of an alarm leave out
        lists = {name: event.get(name) for name in ("left_out", "ranks", "nodes")}
        more = [f"{name} {each}" for name, each in lists.items() if isinstance(each, list) and each]
        told = ", ".join([words(event), *more])
        rows.append((clock(event["time"]), kind, event.get("step", ""), told))
    return rows


def clock(seconds: float) -> str:
    """Formats seconds since 1970 as UTC."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):  # no run has written it
        return "?"
