"""Writes down where the time of a start went: the event `started`."""

import torch.distributed as dist

from runtime.listener import Listener, Run
from runtime.log.events import append_event
from runtime.start.parts import forget_parts, part_ends, seconds_by_part
from runtime.trainer_state import Start


class StartTimes(Listener):
    """Writes the seconds of each part of a start (parts.py) on rank 0, after the first step.
    First in the list of listeners."""

    def __init__(self) -> None:
        self.written = False

    def begins(self, run: Run) -> None:
        part_ends("listeners")

    def after_step(self, run: Run) -> None:
        if self.written:
            return
        self.written = True
        part_ends("step")
        seconds = seconds_by_part(run.start.since)
        if dist.get_rank() == 0:
            append_event(run.config.run.dir, "started", step=run.first_step, seconds=seconds)

    def went_back(self, run: Run, start: Start) -> None:
        forget_parts()  # loading this checkpoint is not part of the next stage's start
