"""Where a run's time went: `python -m tools.report RUN`

Over all its starts, from events.jsonl in the run folder: seconds by cause, as training/ledger.py defines them, and the share
that the run's last state owes its existence to.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from errors import UserError
from training.events import read_events
from training.ledger import account

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


def read(run: Path) -> list[dict[str, Any]]:
    if not (run / "events.jsonl").is_file():
        raise UserError("RUN", str(run), "has no events.jsonl", "give a run's folder (run.dir)")
    return read_events(run)


def ledger_lines(events: list[dict[str, Any]]) -> list[str]:
    """The ledger as a table, and what happened how often."""
    seconds = account(events)
    total = sum(seconds.values())
    lines = [f"{MEANING[cause]:<22}{value:>12,.1f} s{value / max(total, 1e-9):>8.1%}" for cause, value in seconds.items()]
    lines.append(f"{'wall clock':<22}{total:>12,.1f} s")
    happened = Counter(event["event"] for event in events)
    failed = sum(event["event"] == "checkpoint" and "failed" in event for event in events)
    lines.append(
        f"{happened['start']} starts, {happened['checkpoint'] - failed} checkpoints ({failed} failed), "
        f"{happened['rollback']} rollbacks, {happened['hang']} hangs"
    )
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    options = parser.parse_args(arguments)
    try:
        events = read(options.run)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(ledger_lines(events)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
