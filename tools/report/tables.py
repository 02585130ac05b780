"""The report page's tables: where the time went, the events, and the configuration. Text is escaped
where it is written."""

from datetime import UTC, datetime
from typing import Any

from runtime.records.events import changes_stage
from runtime.records.tracker import is_number
from tools.report.charts import escape
from tools.report.run import Run

MEANING = {
    "steps": "steps",
    "lost": "repeated steps",
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
# events shown in other parts of the page, or by what follows them
ELSEWHERE = ("spent", "memory", "system", "started", "examining")


def ledger(run: Run) -> str:
    """The run's seconds by cause, as a bar and a table."""
    total = sum(run.seconds.values())
    if not total:
        unknown = "events.jsonl does not record it."
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
    """A table of starts, ends, rollbacks, hangs and failed saves, by time; the number of successful
    saves; and the skipped updates."""
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
    """An event in words; None if the table does not show it."""
    kind = event["event"]
    if kind in ELSEWHERE or changes_stage(event):  # the event `stage` tells of that
        return None
    if kind == "checkpoint" and "failed" not in event:
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
            f", skipping samples {samples[0]:,} to {samples[1] - 1:,}" if pair else ""
        )
    if kind == "slow_rank":
        who = f"rank {event.get('rank', '?')} on {event.get('node', '?')}"
        if event.get("ended"):
            return f"{who} is no longer slow"
        return f"{who}: {event.get('factor', '?')} times its peers since {event.get('since', '?')}"
    if kind == "suspicion":
        who = f" (ranks {event.get('ranks')} on {event.get('nodes')})" if event.get("ranks") else ""
        told = (event.get(name, "?") for name in ("cause", "verdict", "why"))
        return "{}: {}{who}, {}".format(*told, who=who)
    return ", ".join(
        f"{name} {value}" for name, value in event.items() if name not in ("event", "time", "step")
    )


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


def configuration(run: Run) -> str:
    """The main settings in a few rows, and the whole config.yaml."""
    if not run.config_text:
        return ""
    shown = {
        "model": tuple(
            key for key, value in run.section("model").items() if value
        ),  # those that are set
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
    """Formats seconds since 1970 as UTC."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return "?"


def duration(seconds: float) -> str:
    """Formats seconds as 3.2 s, 12 min 4 s, 5 h 12 min or 3 d 4 h."""
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
