"""Writes down where the time of a start went: the event `started`."""

import torch.distributed as dist

from runtime.events import append_event
from runtime.listener import Listener, Run
from runtime.start_parts import part_ends, seconds_by_part


class StartTimes(Listener):
    """Writes the seconds of each part of a start (start_parts.py) on rank 0, after the first step.
    First in the list of listeners."""

    def begins(self, run: Run) -> None:
        part_ends("listeners")

    def after_step(self, run: Run) -> None:
        if run.step != run.first_step + 1:
            return
        part_ends("step")
        seconds = seconds_by_part()
        if dist.get_rank() == 0 and seconds:
            append_event(run.config.run.dir, "started", step=run.first_step, seconds=seconds)
