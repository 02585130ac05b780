"""A weight in forward and backward: this rank's tensor of it, the three products it takes part in, and its gradient.

The gradient of a weight is needed by the optimizer alone; the gradient of a layer's *input* is what other ranks wait for. So a
pipeline schedule may split backward and form weight gradients later, where a rank would have nothing to do (zero bubble:
Qi et al. 2023, https://arxiv.org/abs/2401.10241). While `WeightGradientQueue` defers, a linear layer's backward leaves a job in
the queue, with what the product needs, its input and its output's gradient; the job adds the result to the weight's `.grad`.
Norm weights and the embedding, whose gradients are no products, are not deferred.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from parallel.collectives import Pending, start_all_gather
from parallel.placement import as_dtensor_like


class Matmul:
    """The three products of every parallel linear layer: the one place to change how they are computed."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        """y [..., F] = x [..., D] · weightᵀ, weight [F, D]."""
        return F.linear(x, weight)

    @staticmethod
    def input_gradient(dy: Tensor, weight: Tensor, into: Tensor | None = None) -> Tensor:
        """dx [..., D] = dy [..., F] · weight; added to `into` where given (several layers that read one input)."""
        if into is None:
            return dy @ weight
        into.view(-1, into.shape[-1]).addmm_(dy.reshape(-1, dy.shape[-1]), weight)
        return into

    @staticmethod
    def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
        """dw [F, D] = dyᵀ · x, summed over all leading dimensions."""
        return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


class LocalWeight(torch.autograd.Function):
    """This rank's tensor of a DTensor weight; its gradient becomes the weight's, placed alike.

    `DTensor.to_local` does the same through the dispatcher, at several times the host time per weight and micro-batch. Here,
    where gradients stay in the weight between micro-batches (float32 computing), all but the first are added to the local
    tensor at once; where FSDP takes each away to sum it in a wider dtype (bfloat16), each is the first. What is added to was
    made by the first call of this backward, from a tensor that every caller has just made, so nobody else holds it.
    """

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)  # a deferred gradient is None here, and not zeros
        return weight.to_local()

    @staticmethod
    def backward(ctx: Any, dw: Tensor | None) -> DTensor | None:
        weight = ctx.weight
        if dw is None:
            return None
        if weight.grad is not None:
            weight.grad.to_local().add_(dw)
            return None
        return as_dtensor_like(dw, weight)


def local_weight(weight: nn.Parameter) -> Tensor:
    """This rank's tensor of a weight."""
    assert isinstance(weight, DTensor)
    if torch.compiler.is_compiling():
        return weight.to_local()  # the compiler knows this one, and pays its price once
    return LocalWeight.apply(weight)


class Destination(NamedTuple):
    """Where a deferred gradient goes."""

    weight: nn.Parameter  # the gathered weight that forward used, with `.grad` in the shape of this tp rank's part
    rows: slice | None  # of that part, which the gradient is for; None: all

    def add(self, dw: Tensor) -> None:
        weight = self.weight
        assert isinstance(weight, DTensor)
        if weight.grad is None and self.rows is None:
            weight.grad = as_dtensor_like(dw, weight)
            return
        if weight.grad is None:
            weight.grad = as_dtensor_like(dw.new_zeros(weight.to_local().shape), weight)
        assert isinstance(weight.grad, DTensor)
        whole = weight.grad.to_local()
        (whole if self.rows is None else whole[self.rows]).add_(dw)


class WeightGradientJob:
    """The weight gradients of the layers that read one input: `start`, then `finish`.

    Args:
        x: their input, or with sequence parallelism this rank's [S/tp, B, D] of it.
        gather_over: the tp group, with sequence parallelism.
        dys: each layer's output gradient.
        destinations: of each layer's weight gradient.
    """

    def __init__(
        self, x: Tensor, gather_over: ProcessGroup | None, dys: Sequence[Tensor], destinations: Sequence[Destination]
    ) -> None:
        self.x, self.gather_over, self.dys, self.destinations = x.detach(), gather_over, dys, destinations
        self.gathering: Pending

    def start(self) -> None:
        """Gather x [S, B, D] over tp."""
        self.gathering = Pending(self.x, None) if self.gather_over is None else start_all_gather(self.x, self.gather_over)

    def finish(self) -> None:
        x = self.gathering.wait()
        for dy, destination in zip(self.dys, self.destinations, strict=True):
            destination.add(Matmul.weight_gradient(dy, x))


class WeightGradientQueue:
    """Shared by the linear layers of a stage. Their backward forms weight gradients at once, or, inside `deferring`, leaves
    them as jobs."""

    def __init__(self) -> None:
        self._jobs: list[WeightGradientJob] | None = None

    @property
    def is_deferring(self) -> bool:
        return self._jobs is not None

    def add(self, job: WeightGradientJob) -> None:
        assert self._jobs is not None
        self._jobs.append(job)

    @contextmanager
    def deferring(self) -> Iterator[list[WeightGradientJob]]:
        """The jobs of the backward inside, to be run later, in their order, on all tp ranks alike."""
        self._jobs = []
        try:
            yield self._jobs
        finally:
            self._jobs = None


def share_queue(stage: nn.Module) -> WeightGradientQueue:
    """A queue for all linear layers of `stage`."""
    queue = WeightGradientQueue()
    for module in stage.modules():
        if hasattr(module, "weight_gradient_queue"):
            setattr(module, "weight_gradient_queue", queue)  # noqa: B010 - nn.Module's attributes have no types
    return queue


@torch.no_grad()
def run_jobs(jobs: Iterable[WeightGradientJob]) -> None:
    """Form the gradients; each job's input is gathered behind the products of the job before."""
    started: WeightGradientJob | None = None
    for job in jobs:
        job.start()
        if started is not None:
            started.finish()
        started = job
    if started is not None:
        started.finish()
