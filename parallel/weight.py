"""A weight in forward and backward: this rank's tensor of it, the three products it takes part in,
and its gradient.

The gradient of a weight is needed by the optimizer alone; the gradient of a layer's *input* is what
other ranks wait for. So a pipeline schedule may split backward and form weight gradients later,
where a rank would have nothing to do (zero bubble: Qi et al. 2023,
https://arxiv.org/abs/2401.10241). While `WeightGradientQueue` defers, a linear layer's backward
leaves a job in the queue, with what the product needs, its input and its output's gradient (of a
tensor that sequence parallelism cuts, this rank's part); the job adds the result to the weight's
`.grad`. The embedding does alike. A norm's gradient, which is small and comes with its input's,
waits in the queue as it is: so all gradients of a micro-batch are complete at one moment, and are
reduced together.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from parallel.collectives import Pending, start_all_gather
from parallel.placement import as_dtensor_like


class Matmul:
    """The three products of every parallel linear layer: the one place to change how they are
    computed."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        """y [..., F] = x [..., D] · weightᵀ, weight [F, D]."""
        return F.linear(x, weight)

    @staticmethod
    def input_gradient(dy: Tensor, weight: Tensor, into: Tensor | None = None) -> Tensor:
        """dx [..., D] = dy [..., F] · weight; added to `into` where given (several layers that read
        one input)."""
        if into is None:
            return dy @ weight
        into.view(-1, into.shape[-1]).addmm_(dy.reshape(-1, dy.shape[-1]), weight)
        return into

    @staticmethod
    def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
        """dw [F, D] = dyᵀ · x, summed over all leading dimensions."""
        return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])

    @staticmethod
    def add_weight_gradient(
        dy: Tensor, x: Tensor, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """dw [F, D] = into + dyᵀ · x, for dy [T, F] and x [T, D], summed in `dtype`, which may be
        wider than theirs (float32 for bfloat16); `into` None: 0. Written into `into`."""
        wide = dy.dtype != dtype
        if into is None:
            into = dy.new_empty((dy.shape[1], x.shape[1]), dtype=dtype)
            beta = 0  # what is there is not read
        else:
            beta = 1
        if wide and dy.is_cuda and torch.version.hip is None:
            return torch.addmm(into, dy.t(), x, out_dtype=dtype, beta=beta, out=into)
        if wide:  # CPUs and AMD's libraries have no such product
            dy, x = dy.to(dtype), x.to(dtype)
        return into.addmm_(dy.t(), x, beta=beta)


class LocalWeight(torch.autograd.Function):
    """This rank's tensor of a DTensor weight; its gradient becomes the weight's, placed alike.

    `DTensor.to_local` does the same through the dispatcher, at several times the host time per
    weight and micro-batch. Here, where gradients stay in the weight between micro-batches (float32
    computing), all but the first are added to the local tensor at once; where FSDP takes each away
    to sum it in a wider dtype (bfloat16), each is the first. What is added to was made by the first
    call of this backward, from a tensor that every caller has just made, so nobody else holds it.
    """

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, queue: "WeightGradientQueue | None") -> Tensor:
        ctx.weight, ctx.queue = weight, queue
        assert isinstance(weight, DTensor)
        ctx.set_materialize_grads(False)  # a deferred gradient is None here, and not zeros
        return weight.to_local()

    @staticmethod
    def backward(ctx: Any, dw: Tensor | None) -> tuple[DTensor | None, None]:
        weight = ctx.weight
        if dw is None:
            return None, None
        if ctx.queue is not None and ctx.queue.is_deferring:
            ctx.queue.add(ReadyGradient(dw, Destination(weight, None)))
            return None, None
        if weight.grad is not None:
            weight.grad.to_local().add_(dw)
            return None, None
        return as_dtensor_like(dw, weight), None


def local_weight(weight: nn.Parameter, queue: "WeightGradientQueue | None") -> Tensor:
    """This rank's tensor of a weight; its gradient waits in `queue` where that defers."""
    assert isinstance(weight, DTensor)
    if torch.compiler.is_compiling():
        return weight.to_local()  # the compiler knows this one, and pays its price once
    if not torch.is_grad_enabled():
        # what `to_local` makes a view of, each time: a fifth of a small model's time for a token
        return weight._local_tensor
    return LocalWeight.apply(weight, queue)


class Destination(NamedTuple):
    """Where a deferred gradient goes."""

    # the gathered weight that forward used, with `.grad` in the shape of this tp rank's part
    weight: nn.Parameter
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
    """The gradient of looked-up rows [V/tp, D], from that of the looked-up vectors, dy [S, B,
    D]."""

    dy: Tensor
    rows: Tensor  # [S, B]: which row of the weight each is
    destination: Destination

    def start(self) -> None:
        pass

    def finish(self) -> None:
        weight = self.destination.weight
        assert isinstance(weight, DTensor)
        self.destination.add(embedding_gradient(self.dy, self.rows, weight.to_local().shape[0]))


def embedding_gradient(dy: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """[num_rows, D]: the sum of dy [..., D] over the places at which each row stands."""
    return torch.ops.aten.embedding_dense_backward(dy, rows, num_rows, -1, False)


class WeightGradientJob:
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
        self._gathering = [
            _gather(self.x, self.gather_x),
            *(_gather(dy, self.gather_dys) for dy in self.dys),
        ]
        self.x, self.dys = None, ()

    def finish(self) -> None:
        x, *dys = (pending.wait() for pending in self._gathering)
        self._gathering = []
        for dy, destination in zip(dys, self.destinations, strict=True):
            destination.add(Matmul.weight_gradient(dy, x))


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


def share_queue(stage: nn.Module) -> WeightGradientQueue:
    """A queue for all layers of `stage`."""
    queue = WeightGradientQueue()
    for module in stage.modules():
        if hasattr(module, "weight_gradient_queue"):
            setattr(module, "weight_gradient_queue", queue)  # noqa: B010 - nn.Module's attributes have no types
    return queue


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
