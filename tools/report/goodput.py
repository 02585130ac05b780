"""How much of a run's time was effective, how often it should have saved, and where the time of its
starts went."""

from typing import Any

from hardware import FAILURES_PER_GPU_DAY
from runtime.records.tracker import is_number
from runtime.start.parts import PARTS
from tools.report.charts import escape
from tools.report.ledger import Measured
from tools.report.run import Run

MOST_STARTS = 20  # the newest ones


def effective_lines(measured: Measured, failures_per_gpu_day: float) -> list[str]:
    """Sentences for the ledger's table: in text, not escaped."""
    lines = [f"effective training time {measured.effective:.1%}; {measured.failures} failures"]
    best = measured.best_interval(failures_per_gpu_day)
    if best is not None and measured.save is not None:
        seconds, steps = best
        lines.append(
            f"best interval between saves: {steps:,} steps ({seconds:,.1f} s), because a save cost "
            f"{measured.save:.3g} s and {failures_per_gpu_day:.3g} failures are expected per GPU "
            "and day"
        )
    return lines


def stated_rate(checkpoint: dict[str, Any]) -> float:
    """checkpoint.failures_per_gpu_day of a run's configuration, which may be older than the key."""
    rate = checkpoint.get("failures_per_gpu_day")
    return float(rate) if is_number(rate) else FAILURES_PER_GPU_DAY


def goodput(run: Run) -> str:
    """A paragraph for the page, and a table of its starts; empty if there is nothing to say."""
    if run.measured is None or not run.measured.seconds:
        return ""
    lines = effective_lines(run.measured, stated_rate(run.section("checkpoint")))
    return (
        f"<section><h2>Saving and restarting</h2><p>{escape('. '.join(lines))}.</p>"
        f"{starts(run)}</section>"
    )


def starts(run: Run) -> str:
    """A table of the newest starts: seconds by part (runtime/start/parts.py)."""
    rows = []
    for event in run.events:
        seconds = event.get("seconds")
        if event["event"] == "started" and isinstance(seconds, dict):
            known = [seconds.get(part) for part in PARTS]
            cells = "".join(f"<td>{v:.2f}</td>" if is_number(v) else "<td></td>" for v in known)
            rows.append(f"<tr><td>{escape(event.get('step', ''))}</td>{cells}</tr>")
    if not rows:
        return ""
    names = "".join(f"<th>{part}</th>" for part in PARTS)
    head = f"<thead><tr><th>from step</th>{names}</tr></thead>"
    return (
        "<p>Seconds of each part of the newest starts:</p>"
        f'<div class="scroll"><table class="figures">{head}<tbody>{"".join(rows[-MOST_STARTS:])}'
        "</tbody></table></div>"
    )
