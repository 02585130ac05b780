"""Writes down where the time of a start went: the event `started`."""

from runtime.listener import Listener, Run
from runtime.start.parts import forget_parts, part_ends, seconds_by_part
from runtime.trainer_state import Start


class StartTimes(Listener):
    """Writes the seconds of each part of a start (parts.py) on rank 0, after the first step.
    First in the list of listeners."""

    def __init__(self) -> None:
        self.written, self.since = False, 0.0

    def begins(self, run: Run) -> None:
        self.since = run.log.busy_since  # the start of the process, or the end of a stage
        part_ends("listeners")

    def after_step(self, run: Run) -> None:
        if self.written:
            return
        self.written = True
        part_ends("step")
        run.log.event("started", step=run.first_step, seconds=seconds_by_part(self.since))

    def went_back(self, run: Run, start: Start) -> None:
        forget_parts()  # loading this checkpoint is not part of the next stage's start
