"""Rollback: when updates were skipped for many steps in a row, the run returns to its last good
checkpoint and leaves out the batches of those steps.

    step        40 (saved)   41   42   43   44   45  bad: 43, 44, 45
    samples          … 320   328  336  344  352  360
    then        40           41   42   43   44 …     43 begins at 360: [336, 360) is never read

The ranges left out are part of the loader's state, so every later checkpoint has them. (The samples
of bad steps in an earlier start are no longer known.) A run that keeps returning to the same
checkpoint has a problem other than bad batches, and ends.

In a run with data stages, a rollback never leaves its own, which counts its own samples. So a data
stage does not end on bad steps: if its last steps are bad, however few, the run goes back
there.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from data.dataset import Mixture
from data.sampler import merge_ranges
from errors import RunFailed
from runtime.checkpoint.load import find_before, load
from runtime.checkpoint.save import Saver
from runtime.listener import Listener, Run
from runtime.output import log
from settings.config import Config

MOST_TO_THE_SAME = 3  # rollbacks to the same checkpoint


class Diverged(RunFailed):
    """Steps stay bad, and a rollback does not help or is not possible."""


class Rollback(Listener):
    """Rolls the run back after too many bad steps; every rank makes the same decision.

    Args:
        config: of the whole run.
        data: the training data of each data stage.
    """

    def __init__(self, config: Config, data: Sequence[Mixture], saver: Saver) -> None:
        self.config, self.data, self.saver = config, data, saver
        self.first_samples: deque[int] = deque()  # of each recent step, and of the next one
        self.gone_back: Counter[int] = Counter()  # how often, by the step of the checkpoint

    def begins(self, run: Run) -> None:
        # The host learns of bad steps only every run.log_interval steps.
        most = run.config.guard.max_bad_steps + run.config.run.log_interval + 1
        self.first_samples = deque([run.loader.next_sample], maxlen=most)
        self.start = run.start  # where the run began; after a rollback, `run.start` is another

    def after_step(self, run: Run) -> None:
        self.first_samples.append(run.loader.next_sample)
        bad, most = run.logged_bad_in_a_row, run.config.guard.max_bad_steps
        too_many = bad >= most or (bad > 0 and run.changes_data_stage)
        if most > 0 and too_many and not run.end_reason:
            with run.pause("rollback"):
                self._go_back(run)
        elif run.step == run.config.train.steps:
            check_not_in_vain(run.step, run.step - run.first_step, bad)

    def _go_back(self, run: Run) -> None:
        """Load the newest good checkpoint from before the bad steps, and continue from there
        without their samples.

        Raises Diverged if this data stage has none, or if the run has already gone back to it
        MOST_TO_THE_SAME times.
        """
        self.saver.wait()
        config, step = self.config, run.step
        bad = min(run.logged_bad_in_a_row, step - run.data_stage.steps.start)  # of this data stage
        why = f"the last {bad} updates, up to step {step}, were skipped (guard.max_bad_steps)"
        # A checkpoint saved on request while steps were bad is no better than the current state.
        start = find_before(step - bad, config, self.data, self.start, self.saver.lease)
        if not start or start.data_stage != run.data_stage.number:
            remedy = "save more often (checkpoint.interval), or change optimizer.lr"
            within = " in this data stage" if config.data_stages else ""
            raise Diverged(f"{why}, and there is no checkpoint to go back to{within}; {remedy}")
        if self.gone_back[start.step] == MOST_TO_THE_SAME:
            remedy = "resume from an earlier checkpoint in another run.dir "
            remedy += "(checkpoint.resume=PATH), with another optimizer.lr or other data"
            often = f"the run has already gone back {MOST_TO_THE_SAME} times to {start.path}"
            raise Diverged(f"{why}; {often}; {remedy}")
        self.gone_back[start.step] += 1
        # The bad steps may have begun in an earlier start, whose samples are not known.
        begin = self.first_samples[-1 - min(bad, len(self.first_samples) - 1)]
        bad_samples = (begin, run.loader.next_sample)
        data = start.state.data
        skipped = merge_ranges([*data.skipped, *run.loader.skipped, bad_samples])
        data = data.model_copy(update={"skipped": [*skipped]})
        start = replace(start, state=start.state.model_copy(update={"data": data}))
        load(run.train, start)
        run.loader.go_to(data.next_sample, data.skipped)
        self.first_samples = deque([data.next_sample], maxlen=self.first_samples.maxlen)
        if dist.get_rank() == 0:
            samples = f"leaving out samples {begin} to {bad_samples[1] - 1}"
            log(f"warning: {why}; rolling back to {start.path}, {samples}")
            run.log.event("rollback", from_step=step, step=start.step, left_out=[*bad_samples])
        run.go_back(start)


def check_not_in_vain(last_step: int, made: int, bad_in_a_row: int) -> None:
    """Fail a run that reaches its last step if the bad steps at its end are more than half of the
    steps `made` since this start: a diverged run must not count as finished. Nothing more is saved.

    Raises RunFailed on every rank.
    """
    if 2 * bad_in_a_row > made:
        since = f"after step {last_step - bad_in_a_row} " if bad_in_a_row < made else ""
        why = "loss or gradient was not finite, or the loss was a spike"
        said = f"no update was made {since}up to the last step, {last_step}: {why}"
        raise RunFailed(f"{said}; try another optimizer.lr")
