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
from errors import RunFailed
from runtime import checkpoint
from runtime.checkpoint import Start
from runtime.events import append_event
from runtime.lease import Lease
from runtime.listener import Listener, Run
from runtime.messages import log
from runtime.metrics import Metrics
from runtime.save import Saver
from runtime.watchdog import Watchdog
from training.guard import check_not_in_vain

MOST_TO_THE_SAME = 3  # rollbacks


class Diverged(RunFailed):
    """Steps stay bad, and going back does not help, or cannot be done."""


class Rollback(Listener):
    """Every rank decides alike.

    Args:
        start: where this run began: what it goes back to while it has no checkpoint of its own.
    """

    def __init__(
        self,
        data: Mixture,
        start: Start,
        lease: Lease,
        saver: Saver,
        metrics: Metrics,
        watchdog: Watchdog,
    ) -> None:
        self.data, self.start, self.lease = data, start, lease
        self.saver, self.metrics, self.watchdog = saver, metrics, watchdog
        self.first_samples: deque[int] = deque()  # of the last steps, and of the next one
        self.times: Counter[int] = Counter()  # how often the run went back to each step

    def begins(self, run: Run) -> None:
        # The host hears of bad steps every run.log_interval steps.
        most = run.config.guard.max_bad_steps + run.config.run.log_interval + 1
        self.first_samples = deque([run.loader.next_sample], maxlen=most)

    def after_step(self, run: Run) -> None:
        self.first_samples.append(run.loader.next_sample)
        if 0 < run.config.guard.max_bad_steps <= run.logged_bad_in_a_row and not run.end_reason:
            with self.metrics.spending("rollback"), self.watchdog.resting():
                self._go_back(run)
        elif run.is_last:
            check_not_in_vain(run.step, run.step - run.first_step, run.logged_bad_in_a_row)

    def _go_back(self, run: Run) -> None:
        """Load the newest good checkpoint from before, and let the loader go on behind it without
        the bad steps' samples.

        Raises Diverged where there is none, or where the run has come back to it MOST_TO_THE_SAME
        times.
        """
        self.saver.wait()
        config, loader, bad, step = run.config, run.loader, run.logged_bad_in_a_row, run.step
        why = f"the updates of {bad} steps up to {step} were skipped (guard.max_bad_steps)"
        # What was saved while steps were bad (on request) is no better than what there is now.
        start = checkpoint.find_before(step - bad, config, self.data, self.start, self.lease)
        if start.path is None or start.weights_only:
            remedy = "set checkpoint.interval, or another lr"
            raise Diverged(f"{why}, and there is no checkpoint to go back to; {remedy}")
        self.times[start.step] += 1
        if self.times[start.step] > MOST_TO_THE_SAME:
            remedy = "begin from an earlier one in another run.dir (checkpoint.resume=PATH), "
            remedy += "with another lr or other data"
            often = f"the run was {MOST_TO_THE_SAME} times back at {start.path} already"
            raise Diverged(f"{why}; {often}: {remedy}")
        # The row may have begun before this start.
        begun = self.first_samples[-1 - min(bad, len(self.first_samples) - 1)]
        left_out = (begun, loader.next_sample)
        checkpoint.load(run.train, start)
        loader.go_to(start.next_sample, [*start.skipped, *loader.skipped, left_out])
        self.first_samples = deque([loader.next_sample], maxlen=self.first_samples.maxlen)
        if dist.get_rank() == 0:
            samples = f"leaving out samples {begun} to {left_out[1] - 1}"
            log(f"warning: {why}: back to {start.path}, {samples}")
            event = {"from_step": step, "step": start.step, "left_out": list(left_out)}
            append_event(config.run.dir, "rollback", **event)
        run.go_back(start)
