"""Rollback: when updates were skipped for many steps in a row, the run returns to its last good
checkpoint and leaves out the batches of those steps.

    step        40 (saved)   41   42   43   44   45  bad: 43, 44, 45
    samples          … 320   328  336  344  352  360
    then        40           41   42   43   44 …     43 begins at 360: [336, 360) is never read

The ranges left out are part of the loader's state, so every later checkpoint has them. (The samples
of bad steps in an earlier start are no longer known.) A run that keeps returning to the same
checkpoint has a problem other than bad batches, and ends.
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

MOST_TO_THE_SAME = 3  # rollbacks to the same checkpoint


class Diverged(RunFailed):
    """Steps stay bad, and a rollback does not help or is not possible."""


class Rollback(Listener):
    """Rolls the run back after too many bad steps; every rank makes the same decision.

    Args:
        start: where this run began, and what it goes back to as long as it has saved no checkpoint.
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
        self.first_samples: deque[int] = deque()  # of each recent step, and of the next one
        self.times: Counter[int] = Counter()  # how often the run went back to each step

    def begins(self, run: Run) -> None:
        # The host learns of bad steps only every run.log_interval steps.
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
        """Load the newest good checkpoint from before the bad steps, and continue from there
        without their samples.

        Raises Diverged if there is none, or if the run has already gone back to it MOST_TO_THE_SAME
        times.
        """
        self.saver.wait()
        config, loader, bad, step = run.config, run.loader, run.logged_bad_in_a_row, run.step
        why = f"the last {bad} updates, up to step {step}, were skipped (guard.max_bad_steps)"
        # A checkpoint saved on request while steps were bad is no better than the current state.
        start = checkpoint.find_before(step - bad, config, self.data, self.start, self.lease)
        if start.path is None or start.weights_only:
            remedy = "set checkpoint.interval, or change optimizer.lr"
            raise Diverged(f"{why}, and there is no checkpoint to go back to; {remedy}")
        self.times[start.step] += 1
        if self.times[start.step] > MOST_TO_THE_SAME:
            remedy = "resume from an earlier checkpoint in another run.dir "
            remedy += "(checkpoint.resume=PATH), with another optimizer.lr or other data"
            often = f"the run has already gone back {MOST_TO_THE_SAME} times to {start.path}"
            raise Diverged(f"{why}; {often}; {remedy}")
        # The bad steps may have begun in an earlier start, whose samples are not known.
        begun = self.first_samples[-1 - min(bad, len(self.first_samples) - 1)]
        left_out = (begun, loader.next_sample)
        checkpoint.load(run.train, start)
        loader.go_to(start.next_sample, [*start.skipped, *loader.skipped, left_out])
        self.first_samples = deque([loader.next_sample], maxlen=self.first_samples.maxlen)
        if dist.get_rank() == 0:
            samples = f"leaving out samples {begun} to {left_out[1] - 1}"
            log(f"warning: {why}; rolling back to {start.path}, {samples}")
            event = {"from_step": step, "step": start.step, "left_out": list(left_out)}
            append_event(config.run.dir, "rollback", **event)
        run.go_back(start)
