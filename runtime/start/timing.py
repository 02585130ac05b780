"""Where the time of a start goes: the event `started`.

    part       ends when
    import     Python has imported the program
    join       all ranks have joined the world; the configuration has been read
    config     the configuration has been checked
    data       the data has been opened
    lease      the run folder belongs to this run
    verify     the checkpoint has been found and its checksums compared
    build      mesh, model and optimizer have been built
    load       the checkpoint has been loaded
    listeners  everything around the steps is ready
    step       the host has made the first step (on a GPU, launched it), compilation included

A part is the time since the one before ended, so waiting for slower ranks belongs to the part in
which rank 0 waits. The parts add up to the time from the process's first line; for a later data
stage, from the end of the one before, and everything before `load` is then in `build`. What a
launcher does before is not in it, but in `down` of the ledger.
"""

import time

from runtime.listener import Listener, Run

_ended: dict[str, float] = {}  # part → when it ended, by time.monotonic; of this process's start


def mark(part: str) -> None:
    """Note that a part of this start has ended."""
    _ended[part] = time.monotonic()


class StartTimes(Listener):
    """Writes the seconds of each part on rank 0, after the first step. First in the list of
    listeners."""

    def __init__(self) -> None:
        self.since = 0.0

    def begins(self, run: Run) -> None:
        self.since = run.log.busy_since  # the start of the process, or the end of a data stage
        mark("listeners")

    def after_step(self, run: Run) -> None:
        if not _ended:
            return  # not the first step
        mark("step")
        seconds, last = {}, self.since
        for part, when in _ended.items():
            seconds[part], last = when - last, when
        _ended.clear()
        run.log.event("started", step=run.first_step, seconds=seconds)
