"""Rollback: when updates were skipped for many steps in a row, the run returns to its last good
checkpoint and leaves out the batches of those steps.

    step        40 (saved)   41   42   43   44   45  bad: 43, 44, 45
    samples          … 320   328  336  344  352  360
    then        40           41   42   43   44 …     43 begins at 360: [336, 360) is never read

The ranges left out are part of the loader's state, so every later checkpoint has them. (The samples
of bad steps in an earlier start of the same stage are no longer known.) A run that keeps returning
to the same checkpoint has a problem other than bad batches, and ends.

In a run with data stages, each counts its own samples. If the bad steps began in an earlier one,
the run leaves this one for the checkpoint's (next_stage.py); samples of both are left out. As that
one then ends further on, text that this one read may be among its own next samples, and the
samples of this one move: so text is left out wherever it comes next in windows of the same length
(data/earlier.py).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from data.dataset import Mixture
from data.earlier import merge_windows, samples_of, windows_of
from data.sampler import merge_ranges, samples_back
from errors import RunFailed
from runtime.checkpoint.history import passed
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.load import Start, find_before, load
from runtime.checkpoint.save import Saver
from runtime.listener import Listener, Run
from runtime.log.events import append_event
from runtime.messages import log
from runtime.metrics.metrics import Metrics
from runtime.watchdog import Watchdog
from settings.config import Config
from settings.data_stages import DataStage, data_stages
from training.guard import check_not_in_vain

MOST_TO_THE_SAME = 3  # rollbacks to the same checkpoint


class Diverged(RunFailed):
    """Steps stay bad, and a rollback does not help or is not possible."""


class Rollback(Listener):
    """Rolls the run back after too many bad steps; every rank makes the same decision.

    Args:
        config: of the whole run.
        data: the training data of each data stage.
        start: where this run began, and what it goes back to as long as it has saved no checkpoint.
    """

    def __init__(
        self,
        config: Config,
        data: Sequence[Mixture],
        start: Start,
        lease: Lease,
        saver: Saver,
        metrics: Metrics,
        watchdog: Watchdog,
    ) -> None:
        self.config, self.data, self.start, self.lease = config, data, start, lease
        self.saver, self.metrics, self.watchdog = saver, metrics, watchdog
        self.first_samples: deque[int] = deque()  # of each recent step, and of the next one

    def begins(self, run: Run) -> None:
        # The host learns of bad steps only every run.log_interval steps.
        most = run.config.guard.max_bad_steps + run.config.run.log_interval + 1
        self.first_samples = deque([run.loader.next_sample], maxlen=most)

    def after_step(self, run: Run) -> None:
        self.first_samples.append(run.loader.next_sample)
        if 0 < run.config.guard.max_bad_steps <= run.logged_bad_in_a_row and not run.end_reason:
            with self.metrics.spending("rollback"), self.watchdog.resting():
                self._go_back(run)
        elif run.step == run.config.train.steps:
            check_not_in_vain(run.step, run.step - run.first_step, run.logged_bad_in_a_row)

    def _go_back(self, run: Run) -> None:
        """Load the newest good checkpoint from before the bad steps, and continue from there
        without their samples.

        Raises Diverged if there is none, or if the run has already gone back to it MOST_TO_THE_SAME
        times.
        """
        self.saver.wait()
        config, bad, step = self.config, run.logged_bad_in_a_row, run.step
        why = f"the last {bad} updates, up to step {step}, were skipped (guard.max_bad_steps)"
        # A checkpoint saved on request while steps were bad is no better than the current state.
        start = find_before(step - bad, config, self.data, self.start, self.lease)
        if start.path is None or start.weights_only:
            remedy = "save more often (checkpoint.interval), or change optimizer.lr"
            raise Diverged(f"{why}, and there is no checkpoint to go back to; {remedy}")
        gone_back = (*run.start.gone_back, start.step)
        if gone_back.count(start.step) > MOST_TO_THE_SAME:
            remedy = "resume from an earlier checkpoint in another run.dir "
            remedy += "(checkpoint.resume=PATH), with another optimizer.lr or other data"
            often = f"the run has already gone back {MOST_TO_THE_SAME} times to {start.path}"
            raise Diverged(f"{why}; {often}; {remedy}")
        stages = data_stages(config)
        left_out = self._samples_of(bad, run, stages)
        start = replace(_without(start, left_out, run, self.data, stages), gone_back=gone_back)
        run.leaves = start.data_stage != run.data_stage.number
        if not run.leaves:
            load(run.train, start)
            run.loader.go_to(start.next_sample, start.skipped)
            self.first_samples = deque([start.next_sample], maxlen=self.first_samples.maxlen)
        if dist.get_rank() == 0:
            ranges = (f"{begin} to {end - 1}" for _, begin, end in left_out)
            samples = f"leaving out samples {' and '.join(ranges)}"
            if run.leaves:
                samples += f", and going on in data stage {start.data_stage}"
            log(f"warning: {why}; rolling back to {start.path}, {samples}")
            event = {"from_step": step, "step": start.step, "left_out": list(left_out[0][1:])}
            if left_out[1:]:
                event["left_out_before"] = [list(one) for one in left_out[1:]]
            append_event(config.run.dir, "rollback", **event)
        run.go_back(start)

    def _samples_of(
        self, bad: int, run: Run, stages: Sequence[DataStage]
    ) -> list[tuple[int, int, int]]:
        """The ranges of samples of the last `bad` steps: (stage, begin, end), this stage first."""
        now, here = run.data_stage, run.loader.next_sample
        more = bad - (run.step - now.steps.start)  # of them, those before this stage
        # The bad steps may have begun in an earlier start, whose samples are not known.
        known = min(bad, len(self.first_samples) - 1)
        begun = 0 if more >= 0 else self.first_samples[-1 - known]
        found = [(now.number, begun, here)]
        for stage in reversed(range(now.number)):
            if more <= 0:
                break
            one, was = stages[stage], run.start.earlier[stage].data
            count = min(more, len(one.steps)) * one.config.train.global_batch_size
            begun = samples_back(was.next_sample, count, merge_ranges(was.skipped))
            found.append((stage, begun, was.next_sample))
            more -= len(one.steps)
        return found


def _without(
    start: Start,
    bad: list[tuple[int, int, int]],
    run: Run,
    data: Sequence[Mixture],
    stages: Sequence[DataStage],
) -> Start:
    """Return `start` without the samples that the run leaves out from now on, `bad` as (stage,
    begin, end), and has left out since."""
    skipped = [run.start.earlier[stage].data.skipped for stage in range(run.data_stage.number)]
    skipped += [[*run.loader.skipped]]
    for stage, *pair in bad:
        skipped[stage] = [*skipped[stage], (pair[0], pair[1])]
    left_out = [*start.left_out, *run.start.left_out]
    for stage in range(start.data_stage + 1, run.data_stage.number + 1):
        seq_len = stages[stage].config.train.seq_len
        before = passed(run.start.earlier[:stage], data)
        left_out += windows_of(data[stage], seq_len, before, skipped[stage])
    seq_len = stages[start.data_stage].config.train.seq_len
    before = passed(start.earlier, data)
    here = samples_of(data[start.data_stage], seq_len, before, left_out)
    return replace(
        start,
        skipped=merge_ranges([*start.skipped, *skipped[start.data_stage], *here]),
        left_out=tuple(merge_windows(left_out)),
    )
