"""The report page's tables: where the time went, what happened, how the run was configured. Text is
escaped where it is written."""

from datetime import UTC, datetime
from typing import Any

from tools.report.charts import escape
from tools.report.run import Run, is_number

MEANING = {
    "steps": "steps that count",
    "lost": "steps made again",
    "data": "waiting for data",
    "evaluation": "evaluation",
    "saving": "saving: copy, check",
    "rollback": "going back",
    "start": "starting",
    "end": "ending",
    "down": "down",
}
MOST_ROWS = 200  # of what happened: the newest
MOST_STEPS = 20  # named as those of skipped updates: the last
ELSEWHERE = ("spent", "memory", "system")  # events that other parts of the page show


def ledger(run: Run) -> str:
    """Every second of the run by its cause: a bar and its table."""
    total = sum(run.seconds.values())
    if not total:
        unknown = "events.jsonl has no line that says."
        return f'<section><h2>Where the time went</h2><p class="muted">{unknown}</p></section>'
    bar, rows = [], []
    for cause, value in run.seconds.items():
        if value > 0:
            name = MEANING[cause]
            bar.append(f'<i class="{cause}" style="width:{value / total:.3%}" title="{name}"></i>')
            key = f'<span class="key {cause}">{name}</span>'
            cells = (key, duration(value), f"{value / total:.1%}")
            rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    foot = f"<tr><td>wall clock, over all starts</td><td>{duration(total)}</td><td></td></tr>"
    table = f'<table class="figures"><tbody>{"".join(rows)}</tbody><tfoot>{foot}</tfoot></table>'
    return (
        f'<section><h2>Where the time went</h2><div class="bar">{"".join(bar)}</div><div '
        f'class="scroll">{table}</div></section>'
    )


def happened(run: Run) -> str:
    """Starts, ends, rollbacks, hangs, failed saves, by time; how many saves went well, and which
    updates were skipped."""
    rows = []
    for event in run.events:
        told = tell(event)
        if told is not None and is_number(event["time"]):
            step = f"{event['step']:,}" if is_number(event.get("step")) else ""
            rows.append((event["time"], str(event["event"]), step, told))
    rows.sort()
    saved = sum(event["event"] == "checkpoint" and "failed" not in event for event in run.events)
    committed = f"{saved:,} checkpoint{'s were' if saved != 1 else ' was'} committed."
    said = [committed] if run.events else []
    said += skipped_updates(run)
    if len(rows) > MOST_ROWS:
        said.append(f"The newest {MOST_ROWS} of {len(rows):,} lines:")
    cells = "".join(
        f'<tr><td>{clock(when)}</td><td class="event '
        f'{what}">{what}</td><td>{step}</td><td>{told}</td></tr>'
        for when, what, step, told in (
            (when, *map(escape, rest)) for when, *rest in rows[-MOST_ROWS:]
        )
    )
    head = "<thead><tr><th>UTC</th><th></th><th>step</th><th></th></tr></thead>"
    table = (
        f'<div class="scroll"><table class="events">{head}<tbody>{cells}</tbody></table></div>'
        if cells
        else ""
    )
    return (
        f"<section><h2>What happened</h2><p>{escape(' '.join(said))}</p>{table}</section>"
        if said
        else ""
    )


def tell(event: dict[str, Any]) -> str | None:
    """An event in words; None: it is no news."""
    kind = event["event"]
    if kind in ELSEWHERE or (kind == "checkpoint" and "failed" not in event):
        return None
    if kind == "start":
        return f"on {event.get('world_size', '?')} ranks"
    if kind == "end":
        return f"{event.get('state', '?')}: {event.get('reason', '')}"
    if kind == "checkpoint":
        return f"not saved: {event['failed']}"
    if kind == "rollback":
        samples = event.get("left_out")
        pair = isinstance(samples, list) and len(samples) == 2 and all(map(is_number, samples))
        return f"back from step {event.get('from_step', '?')}" + (
            f", leaving out samples {samples[0]:,} to {samples[1] - 1:,}" if pair else ""
        )
    return ", ".join(
        f"{name} {value}" for name, value in event.items() if name not in ("event", "time", "step")
    )


def skipped_updates(run: Run) -> list[str]:
    """A sentence where there are any: how many, and at which logged steps it was heard of them."""
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
        f"it was logged at step {steps}."
    ]


def configuration(run: Run) -> str:
    """What the run was, in a few rows, and the whole of config.yaml."""
    if not run.config_text:
        return ""
    shown = {
        "model": tuple(key for key, value in run.section("model").items() if value),  # what is set
        "parallel": (
            "tp",
            "pp",
            "dp_shard",
            "dp_replicate",
            "zero_stage",
            "schedule",
            "stages_per_rank",
        ),
        "train": (
            "global_batch_size",
            "micro_batch_size",
            "seq_len",
            "dtype",
            "activation_checkpointing",
            "seed",
        ),
        "optimizer": ("lr", "schedule", "warmup_steps", "weight_decay", "grad_clip"),
        "data": ("path",),
    }
    rows = []
    for name, keys in shown.items():
        section = run.section(name)
        cells = "".join(
            f"<span>{key} <b>{escape(section[key])}</b></span>" for key in keys if key in section
        )
        rows.append(f"<tr><td>{name}</td><td>{cells}</td></tr>" if cells else "")
    table = f'<div class="scroll"><table class="settings">{"".join(rows)}</table></div>'
    whole = f"<details><summary>config.yaml</summary><pre>{escape(run.config_text)}</pre></details>"
    return f"<section><h2>Configuration</h2>{table}{whole}</section>"


def clock(seconds: float) -> str:
    """UTC of seconds since 1970."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return "?"


def duration(seconds: float) -> str:
    """3.2 s, 12 min 4 s, 5 h 12 min, 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60 // 1:.0f} s"
    minutes = round(seconds / 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes < 48 * 60
        else f"{minutes // 1440} d {minutes % 1440 // 60} h"
    )
