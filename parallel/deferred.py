"""Weight gradients that are formed later than their backward.

Only the optimizer needs a weight's gradient; the gradient of a layer's *input* is what other ranks
wait for. So a pipeline schedule may split backward and form weight gradients later, where a rank
would have nothing to do (zero bubble: Qi et al. 2023, https://arxiv.org/abs/2401.10241). While
`WeightGradientQueue` defers, a linear layer's backward leaves a job for the runner, with what the
product needs: its input and its output's gradient (of a tensor that sequence parallelism cuts, this
rank's part). The job adds the result to the weight's `.grad`. The embedding does the same. A norm's
gradient, which is small and comes with its input's, waits in the queue as it is: so all gradients
of a micro-batch are complete at one moment, and are reduced together.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel.collectives import Pending, start_all_gather
from parallel.memory import GRADIENTS, tell
from parallel.placement import as_dtensor_like, local_part


class LinearProducts(Protocol):
    """The three products of a linear layer. The model makes one for each (model/matmul.py)."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """y [..., F] = x [..., D] · weightᵀ, weight [F, D]."""

    def input_gradient(self, dy: Tensor, weight: Tensor, into: Tensor | None = None) -> Tensor:
        """dx [..., D] = dy [..., F] · weight, added to `into` where given."""

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """dw [F, D] = dyᵀ · x, summed over all leading dimensions."""

    def add_weight_gradient(
        self, dy: Tensor, x: Tensor, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """into + dyᵀ · x, summed in `dtype`; for dy [T, F] and x [T, D]."""


class Destination(NamedTuple):
    """Where a deferred gradient goes."""

    weight: nn.Parameter  # the gathered weight that forward used; `.grad` is this tp rank's part
    rows: slice | None = None  # of that part, which the gradient is for; None: all
    matmul: LinearProducts | None = None  # of a linear layer

    def add(self, dw: Tensor) -> None:
        weight = self.weight
        tell(dw, GRADIENTS)
        if weight.grad is None and self.rows is None:
            weight.grad = as_dtensor_like(dw, weight)
            return
        if weight.grad is None:
            weight.grad = as_dtensor_like(dw.new_zeros(local_part(weight).shape), weight)
        whole = local_part(weight.grad)
        (whole if self.rows is None else whole[self.rows]).add_(dw)


class Job(Protocol):
    """What is left of a weight's gradient to do: `start` communication, then `finish`."""

    def start(self) -> None: ...

    def finish(self) -> None: ...


@dataclass
class ReadyGradient:
    """A gradient that came with the input's."""

    gradient: Tensor
    destination: Destination

    def start(self) -> None:
        pass

    def finish(self) -> None:
        self.destination.add(self.gradient)


@dataclass
class EmbeddingGradient:
    """The gradient of looked-up rows [V/tp, D], from that of the vectors, dy [S, B, D]."""

    dy: Tensor
    rows: Tensor  # [S, B]: which row of the weight each is
    destination: Destination

    def start(self) -> None:
        pass

    def finish(self) -> None:
        num_rows = local_part(self.destination.weight).shape[0]
        self.destination.add(embedding_gradient(self.dy, self.rows, num_rows))


def embedding_gradient(dy: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """[num_rows, D]: the sum of dy [..., D] over the places that use each row."""
    return torch.ops.aten.embedding_dense_backward(dy, rows, num_rows, -1, False)


class LinearGradients:
    """The weight gradients of the layers that read one input: `start`, then `finish`, which lets go
    of what the job held.

    Args:
        x: their input.
        dys: each layer's output gradient.
        destinations: of each layer's weight gradient.
        gather_x, gather_dys: the tp group where these are this rank's part [S/tp, B, …] of the
            sequence; None: they are whole.
    """

    def __init__(
        self,
        x: Tensor,
        dys: Sequence[Tensor],
        destinations: Sequence[Destination],
        gather_x: ProcessGroup | None = None,
        gather_dys: ProcessGroup | None = None,
    ) -> None:
        self.destinations, self.gather_x, self.gather_dys = destinations, gather_x, gather_dys
        self.x: Tensor | None = x.detach()
        self.dys: Sequence[Tensor] = dys
        self._gathering: list[Pending] = []

    def start(self) -> None:
        """Gather x [S, B, D] or dy [S, B, F] over tp."""
        assert self.x is not None
        self._gathering = [_gather(self.x, self.gather_x)]
        self._gathering += [_gather(dy, self.gather_dys) for dy in self.dys]
        self.x, self.dys = None, ()

    def finish(self) -> None:
        x, *dys = (pending.wait() for pending in self._gathering)
        self._gathering = []
        for dy, destination in zip(dys, self.destinations, strict=True):
            assert destination.matmul is not None
            destination.add(destination.matmul.weight_gradient(dy, x))


def _gather(x: Tensor, group: ProcessGroup | None) -> Pending:
    return Pending(x, None) if group is None else start_all_gather(x, group)


class WeightGradientQueue:
    """Shared by the layers of a stage. Their backward forms weight gradients at once, or, inside
    `deferring`, leaves them as jobs."""

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
        """The jobs of the backward inside, to be run later, in their order, on all tp ranks
        alike."""
        self._jobs = []
        try:
            yield self._jobs
        finally:
            self._jobs = None


@torch.no_grad()
def run_jobs(jobs: list[Job]) -> None:
    """Form the gradients, and empty the list; each job's tensors are gathered behind the products
    of the job before."""
    jobs.reverse()
    started: Job | None = None
    while jobs:
        job = jobs.pop()
        job.start()
        if started is not None:
            started.finish()
        started = job
    if started is not None:
        started.finish()
