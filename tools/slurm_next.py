"""Decides what becomes of a Slurm job: `python -m tools.slurm_next LOGS [STATUS]`

slurm/train_70b.sh asks it and does what it prints: the job's exit status, and one of

    finished          nothing is left for later jobs
    stopped: WHY      a user wants the run to stay stopped until it is submitted again
    next: WHY         the next job of the array continues the run
    requeue: WHY      the run has steps left
    refused: WHY      the next start would be refused, too
    give up: WHY      too many starts in a row made no checkpoint

Where the job would be requeued, a call counts the starts in a row without a new checkpoint, each
once, in RUN/logs/JOB.fruitless ("2 7 step-00000300": two, of which the last is restart 7, and the
newest checkpoint). Without torch, which takes seconds to import: the job may have no more.
"""

import os
from pathlib import Path
from typing import Any

from runtime.log.log_lines import content, json_object
from runtime.output import log
from tools.command import CommandParser, run_command

MAX_FRUITLESS = 3  # after this many starts in a row without a new checkpoint, no more requeueing


def what_next(logs: Path, status: int | None) -> tuple[int, str]:
    """Return the job's exit status, and what is next in the words above.

    Args:
        logs: of this start: RUN/logs/JOB.RESTARTS. In it, before training began, `nodes` was
            written, and RUN/checkpoints/latest copied to `newest`.
        status: with which training ended; None: it does not end in time, or it did not begin. It
            may be that of a node which died, or failed after the run had ended.
    """
    file = logs.parent.parent / "status.json"  # after a failure, perhaps an older start's
    ended: dict[str, Any] = {}
    if status == 0 or (status and _modified(file) > _modified(logs / "nodes")):
        ended = json_object(content(file))
    state, why = ended.get("state", "at an unknown point"), str(ended.get("reason", ""))
    # The marks of ranks that were refused, who have stopped torchrun (runtime/exit.py). If that was
    # a displaced rank 0, the others may have gone on, and ended properly later. A later failure
    # does not tell: it may be that of a rank 0 that lost its connection to the rank refused.
    marks = [_modified(mark) for mark in logs.glob("*/*/attempt_*/refused")]
    has_gone_on = state in ("finished", "requeue") and _modified(file) > max(marks, default=0.0)
    if status and marks and not has_gone_on:
        return 2, "refused: and the next start would be, too"
    if state == "finished":
        return 0, "finished"
    if state == "requeue":
        status = 0
        if "file STOP" in why:
            return 0, f"stopped: {why}"
    return status or 0, _go_on(logs, f"the run is {state}" + (f": {why}" if why else ""))


def _go_on(logs: Path, why: str) -> str:
    """In an array, only the last job requeues itself; the others leave the steps to the next."""
    if os.environ.get("SLURM_ARRAY_TASK_ID") != os.environ.get("SLURM_ARRAY_TASK_MAX"):
        return f"next: {why}"
    job, _, restarts = logs.name.rpartition(".")
    count, counted = 0, logs.with_name(f"{job}.fruitless")
    latest = content(logs.parent.parent / "checkpoints" / "latest").strip()
    if content(logs / "newest").strip() == latest:
        said = content(counted).split() if restarts != "0" else []
        # A start in between whose node died did not ask, but may have made a checkpoint.
        in_a_row = said[2:] == latest.split() and said[0:1] and said[0].isdigit()
        count = max(1, (int(said[0]) if in_a_row else 0) + (said[1:2] != [restarts.encode()]))
    try:
        counted.write_text(f"{count} {restarts} {latest.decode(errors='replace')}\n")
    except OSError as error:  # a full disk
        log(f"warning: starts without a checkpoint are not counted: {error}")
    if count >= MAX_FRUITLESS:
        return f"give up: {count} starts in a row made no checkpoint"
    return f"requeue: {why}"


def _modified(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(prog="python -m tools.slurm_next", description=__doc__)
    parser.option("logs", Path, "LOGS", "the folder of this start's logs, in the run folder")
    parser.option("status", int, "STATUS", "with which training ended, if it did", nargs="?")
    options = parser.parse_args(arguments)
    print(*what_next(options.logs, options.status))


if __name__ == "__main__":
    run_command(main)
