"""Shows where a run's time went: `python -m tools.report RUN [--out FILE.html]`

Prints the seconds by cause over all starts of the run, from events.jsonl in the run folder.
runtime/records/ledger.py defines the causes, one of which is the steps that led to the last state.

--out also writes the whole run as one HTML page: loss, gradient norm, speed, memory by rank, the
ledger, the events, and the pipeline's timeline if the run was traced (run.trace=true). The page
needs no network and no other file. The run may still be in progress.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from errors import UserError
from runtime.records.events import changes_stage
from runtime.records.ledger import account
from tools.command import CommandParser, run_command
from tools.report.goodput import effective_lines, stated_rate
from tools.report.ledger import events_of, measure
from tools.report.page import page
from tools.report.run import read_run
from tools.report.tables import MEANING


def ledger_lines(events: list[dict[str, Any]], rate: float) -> list[str]:
    """The ledger as a table, the best interval between saves for this failure rate, and the number
    of events by kind."""
    seconds, measured = account(events), measure(events)
    total = sum(seconds.values())
    lines = [
        f"{MEANING[cause]:<22}{value:>12,.1f} s{value / max(total, 1e-9):>8.1%}"
        for cause, value in seconds.items()
    ]
    lines.append(f"{'wall clock':<22}{total:>12,.1f} s")
    lines += effective_lines(measured, rate)
    happened = Counter(event["event"] for event in events if not changes_stage(event))
    failed = sum(event["event"] == "checkpoint" and "failed" in event for event in events)
    lines.append(
        f"{happened['start']} starts, {happened['checkpoint'] - failed} checkpoints ({failed} "
        "failed), "
        f"{happened['rollback']} rollbacks, {happened['hang']} hangs"
    )
    return lines


def write_page(run: Path, out: Path) -> None:
    if out.suffix != ".html":
        raise UserError("--out", str(out), "its name does not end in .html", "end it in .html")
    text = page(read_run(run))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        why = f"it cannot be written ({error.strerror})"
        raise UserError("--out", str(out), why, "give another file") from None


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.report", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the run folder (run.dir)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page to write: .html")
    options = parser.parse_args(arguments)
    try:
        if options.out is not None:
            write_page(options.run, options.out)
        if options.out is None or (options.run / "events.jsonl").is_file():
            rate = stated_rate(read_run(options.run).section("checkpoint"))
            print("\n".join(ledger_lines(events_of(options.run, "RUN"), rate)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.out is not None:
        print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
