"""Rollback: when updates were skipped for many steps in a row, the run returns to its last good
checkpoint and leaves out the batches of those steps.

    step        40 (saved)   41   42   43   44   45  bad: 43, 44, 45
    samples          … 320   328  336  344  352  360
    then        40           41   42   43   44 …     43 begins at 360: [336, 360) is never read

The ranges left out are part of the loader's state, so every later checkpoint has them. (The samples
of bad steps in an earlier start of the same stage are no longer known.) A run that keeps returning
to the same checkpoint has a problem other than bad batches, and ends.

In a run with stages, each stage counts its own samples. If the bad steps began in an earlier stage,
the run leaves this one for the checkpoint's (next_stage.py); samples of both are left out. As that
stage then ends further on, text that this one read may be among its own next samples, and the
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
from runtime.messages import log
from training.guard import check_not_in_vain

MOST_TO_THE_SAME = 3  # rollbacks to the same checkpoint


class Diverged(RunFailed):
    """Steps stay bad, and a rollback does not help or is not possible."""


class Rollback(Listener):
    """Rolls the run back after too many bad steps; every rank makes the same decision.

    Args:
        data: the training data of each stage.
        start: where this run began, and what it goes back to as long as it has saved no checkpoint.
    """

    def __init__(self, data: Sequence[Mixture], start: Start, lease: Lease, saver: Saver) -> None:
        self.data, self.start, self.lease, self.saver = data, start, lease, saver
        self.first_samples: deque[int] = deque()  # of each recent step, and of the next one

    def begins(self, run: Run) -> None:
        # The host learns of bad steps only every run.log_interval steps.
        most = run.config.guard.max_bad_steps + run.config.run.log_interval + 1
        self.first_samples = deque([run.loader.next_sample], maxlen=most)

    def after_step(self, run: Run) -> None:
        self.first_samples.append(run.loader.next_sample)
        if 0 < run.config.guard.max_bad_steps <= run.logged_bad_in_a_row and not run.end_reason:
            with run.pause("rollback"):
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
        config, bad, step = run.config, run.logged_bad_in_a_row, run.step
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
        left_out = self._samples_of(bad, run)
        start = replace(_without(start, left_out, run, self.data), gone_back=gone_back)
        run.leaves = start.stage != config.stage
        if not run.leaves:
            load(run.train, start)
            run.loader.go_to(start.next_sample, start.skipped)
            self.first_samples = deque([start.next_sample], maxlen=self.first_samples.maxlen)
        if dist.get_rank() == 0:
            ranges = (f"{begin} to {end - 1}" for _, begin, end in left_out)
            samples = f"leaving out samples {' and '.join(ranges)}"
            if run.leaves:
                samples += f", and going on in stage {start.stage}"
            log(f"warning: {why}; rolling back to {start.path}, {samples}")
            event = {"from_step": step, "step": start.step, "left_out": list(left_out[0][1:])}
            if left_out[1:]:
                event["left_out_before"] = [list(one) for one in left_out[1:]]
            run.log.event("rollback", **event)
        run.go_back(start)

    def _samples_of(self, bad: int, run: Run) -> list[tuple[int, int, int]]:
        """The ranges of samples of the last `bad` steps: (stage, begin, end), this stage first."""
        config, here = run.config, run.loader.next_sample
        more = bad - (run.step - config.steps.start)  # of them, those before this stage
        # The bad steps may have begun in an earlier start, whose samples are not known.
        known = min(bad, len(self.first_samples) - 1)
        begun = 0 if more >= 0 else self.first_samples[-1 - known]
        found = [(config.stage, begun, here)]
        for stage in reversed(range(config.stage)):
            if more <= 0:
                break
            one, was = config.at_stage(stage), run.start.earlier[stage].data
            count = min(more, len(one.steps)) * one.train.global_batch_size
            begun = samples_back(was.next_sample, count, merge_ranges(was.skipped))
            found.append((stage, begun, was.next_sample))
            more -= len(one.steps)
        return found


def _without(
    start: Start, bad: list[tuple[int, int, int]], run: Run, data: Sequence[Mixture]
) -> Start:
    """Return `start` without the samples that the run leaves out from now on, `bad` as (stage,
    begin, end), and has left out since."""
    skipped = [run.start.earlier[stage].data.skipped for stage in range(run.config.stage)]
    skipped += [[*run.loader.skipped]]
    for stage, *pair in bad:
        skipped[stage] = [*skipped[stage], (pair[0], pair[1])]
    left_out = [*start.left_out, *run.start.left_out]
    for stage in range(start.stage + 1, run.config.stage + 1):
        seq_len = run.config.at_stage(stage).train.seq_len
        before = passed(run.start.earlier[:stage], data)
        left_out += windows_of(data[stage], seq_len, before, skipped[stage])
    seq_len = run.config.at_stage(start.stage).train.seq_len
    before = passed(start.earlier, data)
    here = samples_of(data[start.stage], seq_len, before, left_out)
    return replace(
        start,
        skipped=merge_ranges([*start.skipped, *skipped[start.stage], *here]),
        left_out=tuple(merge_windows(left_out)),
    )
