"""Prints a rank's memory report (runtime/metrics/memory_report.py) next to that rank's plan."""

from pathlib import Path

from errors import UserError
from runtime.metrics.memory_report import table
from runtime.schema import Natural, Strict
from settings.config import Config
from tools.plan.hardware import read_file
from tools.plan.layout import Layout
from tools.plan.memory import Memory


class Report(Strict, extra="ignore"):
    """What is read of a memory report, which may come from another machine."""

    why: str
    rank: Natural
    world: Natural
    held_bytes: dict[str, Natural]
    total_bytes: Natural


def read_report(file: Path) -> Report:
    """Read a memory report. Raises UserError for a file that is not one."""
    remedy = "give a file RUN/memory/step-….json"
    return read_file("--beside", file, Report, "memory report", remedy)


def beside(config: Config, report: Report) -> str:
    """The report's table with a second column, the plan of its rank at its peak. Raises UserError
    if the world has no such rank."""
    if report.rank >= report.world:
        why = f"is not a rank of a world of {report.world}"
        raise UserError("--beside", report.rank, why, "give the file as the run wrote it")
    plan = Memory(Layout.of_rank(config, report.world, report.rank))
    moment = "between actions" if plan.peak_action is None else f"in {plan.peak_action}"
    beside_each_other = "\n".join(table(report.held_bytes, report.total_bytes, plan.at_peak))
    return (
        f"rank {report.rank} of {report.world}: {report.why}\n\n{beside_each_other}\n\n"
        f"The plan is for a GPU, and its peak is {moment}."
    )
