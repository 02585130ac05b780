"""Deferred weight gradients: jobs release their tensors when they finish, and overlap."""

import gc
import weakref

import torch

from parallel.collectives import ONE_RANK
from parallel.deferred import Job, run_jobs
from parallel.weight_gradient import Place, WeightGradient, deferring


class LoggedJob(Job):
    """A job that logs the number of live jobs when it starts and when it finishes."""

    def __init__(self, alive, log):
        super().__init__(torch.numel, [torch.zeros(3)], gather_over=[ONE_RANK])
        self.alive, self.log = alive, log
        alive.add(self)

    def start(self):
        super().start()
        self.log.append(("start", len(self.alive)))

    def finish(self):
        super().finish()
        self.log.append(("finish", len(self.alive)))


def test_a_finished_job_is_let_go():
    """Finished jobs are freed at once and the list is emptied. At any time at most two jobs have
    started and not finished: one computes, and the next gathers."""
    alive, log = weakref.WeakSet(), []
    jobs = [LoggedJob(alive, log) for _ in range(5)]
    run_jobs(jobs)
    gc.collect()
    assert jobs == []
    assert [left for what, left in log if what == "finish"] == [5, 4, 3, 2, 1]
    assert [what for what, _ in log[:4]] == ["start", "start", "finish", "start"]


def test_a_job_without_communication_does_not_come_between():
    """A finished gradient between two linear layers does not end the overlap of the second one's
    gather with the first one's products."""
    alive, log = weakref.WeakSet(), []
    gradient, times = WeightGradient([2]), torch.tensor(3.0)
    gradient.sum_in(Place(), torch.float32)
    with deferring([gradient]) as ready:
        for _ in range(2):
            assert gradient.add(torch.ones(2), times) is None
    assert gradient.total is None
    run_jobs([LoggedJob(alive, log), *ready, LoggedJob(alive, log)])
    assert [what for what, _ in log] == ["start", "start", "finish", "finish"]
    assert gradient.total.tolist() == [6, 6]
