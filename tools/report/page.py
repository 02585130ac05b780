"""Assembles the data read by run.py into one self-contained HTML page.

Its Content-Security-Policy forbids the browser to load anything, and to run any script except the
page's own, which is identified by its hash. The content of a run's files is treated as text, and
escaped where it is written.
"""

import base64
import hashlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from runtime.records.tracker import is_number
from tools.report.charts import BINS, Series, escape, line_chart, short, timeline_figure
from tools.report.experts import expert_charts, expert_table
from tools.report.goodput import goodput
from tools.report.run import Run
from tools.report.tables import clock, configuration, happened, ledger

ASSETS = Path(__file__).parent / "assets"
GIB = 2**30


def page(run: Run) -> str:
    """The whole HTML document."""
    style, script = (
        (ASSETS / name).read_text(encoding="utf-8") for name in ("report.css", "report.js")
    )
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{hashed}'"
    )
    body = [head(run), tiles(run), '<main class="charts">', *charts(run), "</main>"]
    body += [ledger(run), goodput(run), expert_table(run), happened(run), configuration(run)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, '
        'initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(run.name)}</title><style>{style}</style></head><body>{''.join(body)}"
        f"<footer>python -m tools.report, {clock(time.time())} "
        f"UTC</footer><script>{script}</script></body></html>\n"
    )


def head(run: Run) -> str:
    """The header: the run's name, its state, and the system on which it runs."""
    system, start = run.last("system"), run.last("start")
    said = []
    if is_number(system.get("parameters")):
        said.append(f"{system['parameters']:,} parameters on {system.get('layout', '')}")
    elif start:
        said.append(f"{start.get('world_size', '?')} ranks")
    said += [str(system["device"])] if "device" in system else []
    said += [f"{name} {system[name]}" for name in ("torch", "python") if name in system]
    state, reason = str(run.status.get("state", "")), str(run.status.get("reason", ""))
    # status.json is written at the end of a start, and removed at the beginning of the next
    if not state:
        state = "running, or killed" if run.events or run.records else "nothing yet"
        times = [event["time"] for event in run.events if is_number(event["time"])]
        reason = f"last line at {clock(max(times))} UTC" if times else ""
    known = state if state in ("finished", "requeue", "failed") else "open"
    return (
        f'<header><h1>{escape(run.name)}</h1><p><span class="state {known}">{escape(state)}</span> '
        f"{escape(reason)}</p>"
        f'<p class="muted">{escape(" · ".join(said))}</p></header>'
    )


def tiles(run: Run) -> str:
    """The run's newest values, as a row of tiles."""
    found = []
    steps = run.section("train").get("steps")
    forms = {
        "step": ("step", lambda v: f"{v:,.0f}", f" of {steps:,}" if is_number(steps) else ""),
        "loss": ("loss", lambda v: f"{v:.4f}", ""),
        "eval_loss": ("held-out loss", lambda v: f"{v:.4f}", ""),
        "tokens": ("tokens", short, ""),
        "tokens_per_second": ("tokens per second", lambda v: f"{v:,.0f}", ""),
        "mfu": ("MFU", lambda v: f"{v:.1%}", ""),
        "peak_memory_bytes": ("peak memory", lambda v: f"{v / GIB:.2f}", " GiB"),
    }
    for key, (name, form, unit) in forms.items():
        value = run.newest(key)
        if value is not None:
            found.append((name, form(value), unit))
    if total := sum(run.seconds.values()):
        found.append(("effective time", f"{run.seconds['steps'] / total:.1%}", ""))
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}<small>{unit}</small></dd></div>"
        for name, value, unit in found
    )
    if not cells:
        return '<p class="muted">No step has been logged yet.</p>'
    return f'<dl class="tiles">{cells}</dl>'


def charts(run: Run) -> list[str]:
    """The charts that have data."""
    loss = [
        Series("training", "c1", run.points("loss")),
        Series("held-out", "c2", run.points("eval_loss"), "dots"),
    ]
    norm = [Series("norm", "c5", run.points("grad_norm"))]
    rate = [Series("rate", "c6", run.points("lr"))]
    speed = [Series("all devices", "c3", run.points("tokens_per_second"))]
    mfu = [Series("MFU", "c2", run.points("mfu", 100))]
    waiting = Series("of it waiting for data", "c4", run.points("data_seconds"))
    whole = Series("step", "c3", run.points("step_seconds"))
    slowest = [Series("slowest rank", "c4", run.points("slowest_rank_factor"))]
    by_step = partial(line_chart, boundaries=run.boundaries)
    found = [
        by_step("Loss", "nats per token", loss, tail=True, wide=True),
        by_step("Gradient norm", "before clipping", norm, log=True),
        by_step("Learning rate", "", rate, zero=True),
        by_step("Speed", "tokens per second", speed, zero=True),
        by_step("Step time", "seconds", [whole, waiting], zero=True),
        by_step("Model FLOPs utilization", "% of dense bf16 peak", mfu, zero=True),
        *task_charts(run, by_step),
        by_step("Slowest rank", "its products' time / its peers'", slowest),
        *expert_charts(run, by_step),
        memory(run, by_step),
    ]
    if run.timelines:
        name, timeline = run.timelines[0]
        found.append(
            timeline_figure(
                timeline,
                f"the first of {len(run.timelines)}, {name}" if len(run.timelines) > 1 else name,
            )
        )
    if len(run.records) > BINS:
        thinned = (
            "A point of a line is the mean of neighbouring steps; "
            "the band covers the range from their smallest to their largest value."
        )
        found.append(f'<p class="muted wide">{thinned}</p>')
    return [figure for figure in found if figure]


def task_charts(run: Run, by_step: Callable[..., str]) -> Iterator[str]:
    """Each task's accuracy per byte, and its bits per byte, in colours that repeat."""
    keys = sorted({key for record in run.records for key in record if key.startswith("task/")})
    charts = (
        ("Tasks: accuracy", "% of examples, per byte", "/accuracy_per_byte", 100.0),
        ("Tasks: text", "bits per byte", "/bits_per_byte", 1.0),
    )
    for title, unit, measure, scale in charts:
        found = [key for key in keys if key.endswith(measure)]
        series = [
            Series(
                key.removeprefix("task/").removesuffix(measure),
                f"c{number % 6 + 1}",
                run.points(key, scale),
                "dots",
            )
            for number, key in enumerate(found)
        ]
        yield by_step(title, unit, series)


def memory(run: Run, by_step: Callable[..., str]) -> str:
    """The peak memory by rank, if the last start recorded it; else that of the largest rank."""
    event = run.last("memory")
    peaks = event.get("peak_bytes")
    by_rank = [
        (rank, peak / GIB)
        for rank, peak in enumerate(peaks if isinstance(peaks, list) else [])
        if is_number(peak)
    ]
    if by_rank:
        unit = f"GiB, up to step {event.get('step', '?')}"
        return line_chart(
            "Peak memory by rank", unit, [Series("peak", "c1", by_rank, "bars")], x_name="rank"
        )
    peak = Series("largest rank", "c1", run.points("peak_memory_bytes", 1 / GIB))
    return by_step("Peak memory", "GiB", [peak], zero=True)
