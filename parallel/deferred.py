"""Weight gradients that are formed later than their backward.

Only the optimizer needs the gradient of a weight, whereas other ranks wait for the gradient of a
layer's *input*. So a pipeline schedule may split backward and form weight gradients later, when a
rank would otherwise be idle (zero bubble: Qi et al. 2023, https://arxiv.org/abs/2401.10241). While
`WeightGradientQueue` defers, the backward of a linear layer leaves a job for the runner. The job
keeps the two tensors of the product, the layer's input and the gradient of its output (this rank's
part of a tensor that sequence parallelism splits), and adds the result to the weight's gradient
(weight_gradient.py). The embedding does the same. A norm's gradient, computed together with that of
its input, waits in the queue, so that all gradients of a micro-batch are reduced together.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.collectives import ONE_RANK, Pending, start_all_gather
from parallel.weight_gradient import Destination


class Job(Protocol):
    """The rest of a weight gradient's work: `start` what it `communicates`, then `finish`."""

    @property
    def communicates(self) -> bool: ...

    def start(self) -> None: ...

    def finish(self) -> None: ...


class LocalJob:  # does not communicate
    communicates = False

    def start(self) -> None:
        pass


@dataclass
class ReadyGradient(LocalJob):
    """A weight gradient that was computed together with the gradient of the input."""

    gradient: Tensor
    destination: Destination
    times: Tensor | None = None  # a scalar, by which the gradient is multiplied

    def finish(self) -> None:
        self.destination.add(self.gradient, self.times)


@dataclass
class EmbeddingGradient(LocalJob):
    """The gradient of an embedding's weight [V/tp, D], from dy [S, B, D] of its output."""

    dy: Tensor
    rows: Tensor  # [S, B]: the row of the weight that each position looked up
    destination: Destination

    def finish(self) -> None:
        self.destination.add(self.destination.of_lookup(self.dy, self.rows))


class LinearGradients:
    """The weight gradients of layers that read the same input. `finish` releases the tensors that
    the job holds.

    Args:
        x: the layers' input.
        dys: the gradient of each layer's output.
        destinations: the destination of each layer's weight gradient.
        gather_x, gather_dys: the tp group to gather x or dys over, if they are this rank's part
            [S/tp, B, …] of the sequence; None: they are whole.
        pieces: of the sequence (parallel/collectives.py).
    """

    communicates = True  # over tp, if it has a group to gather over

    def __init__(
        self,
        x: Tensor,
        dys: Sequence[Tensor],
        destinations: Sequence[Destination],
        gather_x: ProcessGroup = ONE_RANK,
        gather_dys: ProcessGroup = ONE_RANK,
        pieces: int = 1,
    ) -> None:
        self.destinations, self.pieces = destinations, pieces
        self.gather_x, self.gather_dys = gather_x, gather_dys
        self.x: Tensor | None = x.detach()
        self.dys: Sequence[Tensor] = dys
        self._gathering: list[Pending] = []

    def start(self) -> None:
        """Start to gather x to [S, B, D], or each dy to [S, B, F], over tp."""
        assert self.x is not None
        self._gathering = [start_all_gather(self.x, self.gather_x, self.pieces)]
        self._gathering += [start_all_gather(dy, self.gather_dys, self.pieces) for dy in self.dys]
        self.x, self.dys = None, ()

    def finish(self) -> None:
        x, *dys = (pending.wait() for pending in self._gathering)
        self._gathering = []
        for dy, destination in zip(dys, self.destinations, strict=True):
            dw = destination.add_product(dy, x)
            if dw is not None:
                destination.add(dw)


class WeightGradientQueue:
    """The queue that the layers of a stage share. Their backward forms weight gradients immediately
    or, inside `deferring`, leaves them here as jobs."""

    def __init__(self) -> None:
        self._jobs: list[Job] | None = None

    @property
    def is_deferring(self) -> bool:
        return self._jobs is not None

    def add(self, job: Job) -> None:
        assert self._jobs is not None
        self._jobs.append(job)

    @contextmanager
    def deferring(self) -> Iterator[list[Job]]:
        """Collect the jobs of the backward that runs inside. All tp ranks must run them later in
        the same order."""
        self._jobs = []
        try:
            yield self._jobs
        finally:
            self._jobs = None


def deliver(
    dw: Tensor,
    queue: WeightGradientQueue | None,
    destination: Destination | None,
    times: Tensor | None = None,
) -> Tensor | None:
    """Hand over a finished gradient, or dw · times for a scalar tensor: to the queue if it defers,
    else to the sum. Without a sum or a destination, return it, for autograd. Nothing else may refer
    to dw."""
    if destination is not None and queue is not None and queue.is_deferring:
        queue.add(ReadyGradient(dw, destination, times))
    elif destination is not None and destination.sum is not None:
        destination.add(dw, times)
    else:
        return dw if times is None else dw.mul_(times)
    return None


@torch.no_grad()
def run_jobs(jobs: list[Job]) -> None:
    """Form the gradients and empty the list. The gathers of each job overlap the products of the
    job before it."""
    jobs.reverse()  # so that `pop` takes the first job, and each is freed after it has run
    started: Job | None = None
    while jobs:
        job = jobs.pop()
        if not job.communicates:  # in between, it would leave the next gather without products
            job.finish()
            continue
        job.start()
        if started is not None:
            started.finish()
        started = job
    if started is not None:
        started.finish()
