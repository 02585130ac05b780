"""Deferred weight gradients: jobs release their tensors when they finish, and overlap."""

import gc
import weakref

import torch
from torch import nn

from parallel.deferred import ReadyGradient, run_jobs
from parallel.layer import Layer, TensorParallel, share_queue
from parallel.weight_gradient import Destination


class Job:
    """A job that logs the number of live jobs when it starts and when it finishes."""

    communicates = True

    def __init__(self, alive, log):
        self.held = torch.zeros(3)
        self.alive, self.log = alive, log
        alive.add(self)

    def start(self):
        self.log.append(("start", len(self.alive)))

    def finish(self):
        self.log.append(("finish", len(self.alive)))


def test_a_finished_job_is_let_go():
    """Finished jobs are freed at once and the list is emptied. At any time at most two jobs have
    started and not finished: one computes, and the next gathers."""
    alive, log = weakref.WeakSet(), []
    jobs = [Job(alive, log) for _ in range(5)]
    run_jobs(jobs)
    gc.collect()
    assert jobs == []
    assert [left for what, left in log if what == "finish"] == [5, 4, 3, 2, 1]
    assert [what for what, _ in log[:4]] == ["start", "start", "finish", "start"]


def test_a_job_without_communication_does_not_come_between():
    """A finished gradient between two linear layers does not end the overlap of the second one's
    gather with the first one's products."""
    alive, log = weakref.WeakSet(), []
    weight = nn.Parameter(torch.zeros(2))
    ready = ReadyGradient(torch.ones(2), Destination(weight))
    run_jobs([Job(alive, log), ready, Job(alive, log)])
    assert [what for what, _ in log] == ["start", "start", "finish", "finish"]
    assert weight.grad.tolist() == [1, 1]


def test_all_layers_of_a_stage_share_one_queue():
    layers = [Layer(TensorParallel()) for _ in range(2)]
    stage = nn.Sequential(layers[0], nn.Linear(2, 2), nn.Sequential(layers[1]))
    queue = share_queue(stage)
    assert [layer.queue for layer in layers] == [queue, queue]
