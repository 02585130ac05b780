"""How much of a run's time was effective, how often it should have saved, and what saves and
restarts took."""

from typing import Any

from hardware import FAILURES_PER_GPU_DAY
from runtime.records.log_lines import is_number
from tools.command import duration
from tools.report.ledger import Measured


def effective_lines(measured: Measured, failures_per_gpu_day: float) -> list[str]:
    """Sentences below the ledger's table."""
    lines = [f"effective training time {measured.effective:.1%}; {measured.failures} failures"]
    best = measured.best_interval(failures_per_gpu_day)
    if best is not None and measured.save is not None:
        seconds, steps = best
        lines.append(
            f"best interval between saves: {steps:,} steps ({seconds:,.1f} s), because a save cost "
            f"{measured.save:.3g} s and {failures_per_gpu_day:.3g} failures are expected per GPU "
            "and day"
        )
    took = {
        "a save": measured.save,
        "its writing": measured.commit,
        "training between saves": measured.interval,
        "a restart after a failure": measured.restart,
    }
    said = [f"{what} {duration(seconds)}" for what, seconds in took.items() if seconds is not None]
    return lines + ["measured: " + ", ".join(said)] * bool(said)


def stated_rate(checkpoint: dict[str, Any]) -> float:
    """checkpoint.failures_per_gpu_day of a run's configuration, which may be older than the key."""
    rate = checkpoint.get("failures_per_gpu_day")
    return float(rate) if is_number(rate) else FAILURES_PER_GPU_DAY
