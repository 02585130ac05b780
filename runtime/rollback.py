"""Going back: when updates were skipped for many steps in a row, the run returns to its last
checkpoint and leaves out the batches at which they were.

    step        40 (saved)   41   42   43   44   45  bad: 43, 44, 45
    samples          … 320   328  336  344  352  360
    then        40           41   42   43   44 …     43 begins at 360: [336, 360) is never read

What is left out is part of the loader's state, so every later checkpoint knows it. (Of bad steps of
the start before, nobody knows the samples any more.) A run that comes back to the same checkpoint
again and again does not have bad batches but another trouble, and ends.
"""

from collections import Counter, deque

import torch.distributed as dist

from data.dataset import Mixture
from data.loader import BatchLoader
from errors import RunFailed
from runtime import checkpoint
from runtime.checkpoint import Start
from runtime.events import append_event
from runtime.lease import Lease
from runtime.messages import log
from runtime.save import Saver
from training.config import Config
from training.step import TrainStep

MOST_TO_THE_SAME = 3  # rollbacks


class Diverged(RunFailed):
    """Steps stay bad, and going back does not help, or cannot be done."""


class Rollback:
    """Every rank makes the same calls, and decides alike.

    Args:
        start: where this run began: what it goes back to while it has no checkpoint of its own.
        lease: of the run folder.
    """

    def __init__(self, config: Config, data: Mixture, start: Start, lease: Lease) -> None:
        self.config, self.data, self.start, self.lease = config, data, start, lease
        # The host hears of bad steps every run.log_interval steps.
        self.first_samples: deque[int] = deque(
            maxlen=config.guard.max_bad_steps + config.run.log_interval
        )
        self.times: Counter[int] = Counter()  # how often the run went back to each step

    def begins_step(self, loader: BatchLoader) -> None:
        """Called before a step takes its batch."""
        self.first_samples.append(loader.next_sample)

    def is_due(self, bad_in_a_row: int) -> bool:
        """After so many bad steps up to the last one."""
        return 0 < self.config.guard.max_bad_steps <= bad_in_a_row

    def go_back(
        self, step: int, bad_in_a_row: int, train: TrainStep, saver: Saver, loader: BatchLoader
    ) -> Start:
        """Load the newest good checkpoint from before, and let the loader go on behind it without
        the bad steps' samples.

        Raises Diverged where there is none, or where the run has come back to it MOST_TO_THE_SAME
        times.
        """
        saver.wait()
        why = f"the updates of {bad_in_a_row} steps up to {step} were skipped (guard.max_bad_steps)"
        # What was saved while steps were bad (on request) is no better than what there is now.
        start = checkpoint.find_before(
            step - bad_in_a_row, self.config, self.data, self.start, self.lease
        )
        if start.path is None or start.weights_only:
            raise Diverged(
                f"{why}, and there is no checkpoint to go back to; set checkpoint.interval, "
                "or another lr"
            )
        self.times[start.step] += 1
        if self.times[start.step] > MOST_TO_THE_SAME:
            remedy = (
                "begin from an earlier one in another run.dir (checkpoint.resume=PATH), "
                "with another lr or other data"
            )
            raise Diverged(
                f"{why}; the run was {MOST_TO_THE_SAME} times back at {start.path} already: "
                f"{remedy}"
            )
        # the row may have begun before this start
        begun = self.first_samples[-min(bad_in_a_row, len(self.first_samples))]
        bad = (begun, loader.next_sample)
        checkpoint.load(train, start)
        loader.go_to(start.next_sample, [*start.skipped, *loader.skipped, bad])
        self.first_samples.clear()
        if dist.get_rank() == 0:
            said = (
                f"warning: {why}: back to {start.path}, leaving out samples {bad[0]} to "
                f"{bad[1] - 1}"
            )
            log(said)
            append_event(
                self.config.run.dir, "rollback", from_step=step, step=start.step, left_out=list(bad)
            )
        return start
