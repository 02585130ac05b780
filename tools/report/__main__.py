"""Shows where a run's time went: `python -m tools.report RUN [--out FILE.html] [--png FILE.png]`

Prints the seconds by cause over all starts of the run, from events.jsonl in the run folder.
runtime/log/ledger.py defines the causes, one of which is the steps that led to the last state.

--out also writes the whole run as one HTML page: loss, gradient norm, speed, the ledger and the
events. The page needs no network and no other file. --png draws only the loss. The run may still be
in progress.
"""

from collections import Counter
from pathlib import Path

from errors import UserError
from tools.command import CommandParser, reports_errors, run_command, table, writes
from tools.report.charts import picture_of_loss
from tools.report.page import page
from tools.report.run import Run, read_run
from tools.timeline.draw import save


def ledger_lines(run: Run) -> list[str]:
    """The ledger as a table, what is said of saving and restarting, and the number of events by
    kind."""
    total = sum(run.seconds.values())
    rows = [
        (cause, f"{value:,.1f} s", f"{value / max(total, 1e-9):.1%}")
        for cause, value in run.seconds.items()
    ]
    happened = Counter(event["event"] for event in run.events)
    failed = sum(event["event"] == "checkpoint" and "failed" in event for event in run.events)
    return [
        table([*rows, ("wall clock", f"{total:,.1f} s", "")]),
        *run.goodput,
        f"{happened['start']} starts, {happened['checkpoint'] - failed} checkpoints ({failed} "
        f"failed), {happened['rollback']} rollbacks, {happened['hang']} hangs",
    ]


@reports_errors
def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(prog="python -m tools.report", description=__doc__)
    parser.option("run", Path, "RUN", "the run folder (run.dir)")
    parser.option("--out", Path, "FILE", "the page to write: .html")
    parser.option("--png", Path, "FILE", "the picture to write: .png")
    options = parser.parse_args(arguments)
    out, png = options.out, options.png
    for option, path, suffix in (("--out", out, ".html"), ("--png", png, ".png")):
        if path is not None and path.suffix != suffix:  # it might be a file of the run
            why = f"its name does not end in {suffix}"
            raise UserError(option, str(path), why, f"end it in {suffix}")
    run = read_run(options.run)
    if png is not None and not run.points("loss"):
        why = "it has no logged step with a finite loss yet"
        raise UserError("RUN", str(options.run), why, "wait for the first one, or leave --png out")
    if out is png is None and not run.events:
        why = "its events.jsonl has no whole line, or cannot be read"
        raise UserError("RUN", str(options.run), why, "wait, or give another run folder (run.dir)")
    if out is not None:
        text = page(run)
        with writes("--out", out):
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, "utf-8", errors="replace")
    if png is not None:
        with writes("--png", png):
            save(picture_of_loss(run), png)
    if run.events:
        print("\n".join(ledger_lines(run)))
    for path in filter(None, (out, png)):
        print(f"wrote {path}")


if __name__ == "__main__":
    run_command(main)
