"""The gradient of a weight: where it is summed over the micro-batches of a step, and when it is
formed.

Each layer has one `WeightGradient`, to which its backward hands gradients over. In isolation it
returns them, for autograd. In a training run data.py or whole.py say where they are summed, and the
product dyᵀ · x adds to the sum:

    without   dw = dyᵀ · x in bfloat16, written and read again; total += dw in float32
    with      total = total + dyᵀ · x, in float32 inside the product, never rounded to bfloat16

This saves one pass over a stage's gradients in every micro-batch, and the memory for dw.
(Megatron-LM calls it gradient accumulation fusion.) Autograd then gets None. Gradients of norms,
routers and the embedding are formed in the dtype of the sum, and added. Only with
zero_stage 2 and 3, and in compiled code, are they rounded to bfloat16 first.

While `deferring`, backward leaves the gradients as jobs for later (`Job`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.collectives import ONE_RANK, Pending, start_all_gather


class LinearProducts(Protocol):
    """The three products of a linear layer. Each layer has its own object (model/matmul.py)."""

    def forward(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """y [..., F] = x [..., D] · weightᵀ, weight [F, D]; written to `out`, which is contiguous,
        if given (if y is computed piece by piece)."""

    def input_gradient(
        self, dy: Tensor, weight: Tensor, into: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """dx [..., D] = dy [..., F] · weight; added to `into` if given (if several layers read the
        same input), or written to `out`, which is contiguous."""

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """dw [F, D] = dyᵀ · x, summed over all leading dimensions."""

    def add_weight_gradient(
        self, dy: Tensor, x: Tensor, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """dw [F, D] = into + dyᵀ · x, for dy [..., F] and x [..., D], written into `into` (None: a
        new tensor, as if it were 0). The sum is in `dtype`, which may be wider than theirs."""


def sum_dtype(
    whole: bool, zero_stage: int, compute: torch.dtype, master: torch.dtype, reduce: torch.dtype
) -> torch.dtype | None:
    """The dtype in which gradients are summed over micro-batches; None: they are not, because each
    micro-batch's are reduced. `whole`: no rank shares the weights, so sums are not sent."""
    if whole:
        return torch.promote_types(reduce, master)
    return torch.promote_types(reduce, compute) if zero_stage < 2 else None


def adds_to_gradients(replicas: int, reduce: torch.dtype, master: torch.dtype) -> bool:
    """Whether the gradients of each micro-batch that is reduced are added to `p.grad` in the master
    dtype, instead of in the reduce dtype until the last one is reduced over the replicas."""
    return replicas == 1 and reduce.itemsize < master.itemsize


@dataclass
class Place:
    """Where a sum of gradients is kept: this tp rank's part of it, or None before the first
    gradient."""

    total: Tensor | None = None


class Job:
    """The rest of a weight gradient's work: `form(*tensors)`. The job lets go of each tensor as
    soon as nothing needs it.

    Only the optimizer needs the gradient of a weight, whereas other ranks wait for the gradient of
    a layer's *input*. So a pipeline schedule may split backward and form weight gradients later,
    when a rank would otherwise be idle (zero bubble: Qi et al. 2023,
    https://arxiv.org/abs/2401.10241). The backward of a linear layer then leaves a job with the two
    tensors of the product: the layer's input and the gradient of its output (this rank's part of a
    tensor that sequence parallelism splits). The embedding does the same. A norm's gradient,
    computed together with that of its input, becomes a job too, and the head's, computed in
    forward, unless it is in a sum: all gradients of a micro-batch are reduced together.

    Args:
        form: hands the gradient over.
        gather_over: for each tensor, the tp group over which it is gathered first, [S/tp, B, …] to
            [S, B, …]; ONE_RANK: it is whole. Empty: the job has nothing to do with tp.
        pieces: of the sequence (parallel/collectives.py).
    """

    def __init__(
        self,
        form: Callable[..., object],
        tensors: Sequence[Tensor],
        gather_over: Sequence[ProcessGroup] = (),
        pieces: int = 1,
    ) -> None:
        self.form, self.tensors, self.gather_over, self.pieces = form, tensors, gather_over, pieces
        self._arriving: list[Pending] = []

    def start(self) -> None:
        """Start to gather."""
        groups = self.gather_over or [ONE_RANK] * len(self.tensors)
        for x, group in zip(self.tensors, groups, strict=True):
            self._arriving.append(start_all_gather(x, group, self.pieces))
        self.tensors = ()

    def finish(self) -> None:
        tensors = [pending.wait() for pending in self._arriving]
        self._arriving = []
        self.form(*tensors)


class WeightGradient:
    """The gradient of a layer's weight, on this tp rank. Its methods return a gradient that is for
    autograd, else None.

    Args:
        shape: of this rank's part of the weight.
        rows: of this part, those that gradients cover; None: all.
    """

    def __init__(self, shape: Sequence[int] = (), rows: slice | None = None) -> None:
        self.shape, self.rows = shape, rows
        self.dtype: torch.dtype | None = None  # of the sum; None: gradients are for autograd
        self.adds = False  # whether the gradients of several micro-batches are added
        self._place = Place()
        self._jobs: list[Job] | None = None

    def sum_in(self, place: Place, dtype: torch.dtype, adds: bool = True) -> None:
        """Put gradients into `place`, in `dtype`, from now on. Without `adds`, the gradient of
        each micro-batch is taken out before the next one is put in."""
        self._place, self.dtype, self.adds = place, dtype, adds

    def defer_to(self, jobs: list[Job] | None) -> None:
        """Leave gradients as `jobs` from now on; None: form them at once."""
        assert self.dtype is not None, "nobody takes a deferred gradient from autograd"
        self._jobs = jobs

    @property
    def total(self) -> Tensor | None:
        """The sum so far."""
        return self._place.total

    @property
    def is_deferred(self) -> bool:
        return self._jobs is not None

    def defer(self, job: Job) -> None:
        """Leave a job, which hands the gradient over when it runs."""
        assert self._jobs is not None
        self._jobs.append(job)

    def add(self, dw: Tensor) -> Tensor | None:
        """Hand over a gradient. Nothing else may refer to dw: it may become the sum."""
        if self.is_deferred:
            self.defer(Job(self.add, (dw,)))
        elif self.dtype is None:
            return dw
        else:
            self._add(dw)
        return None

    def add_product(self, matmul: LinearProducts, dy: Tensor, x: Tensor) -> Tensor | None:
        """Hand over dyᵀ · x, for dy [..., F] and x [..., D], at once. To defer it is the caller's
        task: the products of layers that read one x are one job (`add_products`)."""
        if self.dtype is None:
            return matmul.weight_gradient(dy, x)
        if not self.adds:
            self._add(matmul.weight_gradient(dy, x))
            return None
        begun = self._begun(dy)
        total = matmul.add_weight_gradient(dy, x, begun, self.dtype)
        if begun is None:
            self._place.total = total
        return None

    def add_lookup(self, dy: Tensor, rows: Tensor) -> Tensor | None:
        """Hand over the gradient of a lookup of rows [S, B], for dy [S, B, D]."""
        if self.is_deferred:
            self.defer(Job(self.add_lookup, (dy, rows)))
            return None
        dy = dy.to(self.dtype) if self.adds else dy
        dw = torch.ops.aten.embedding_dense_backward(dy, rows, self.shape[0], -1, False)
        return self.add(dw)

    def _begun(self, like: Tensor) -> Tensor | None:
        """The `rows` of the sum, to which a gradient is added; a sum of some rows begins with zeros
        (on the device of `like`). None: the gradient, the first, becomes the sum."""
        total = self.total
        if self.rows is None:
            return total
        if total is None:
            self._place.total = total = like.new_zeros(self.shape, dtype=self.dtype)
        return total[self.rows]

    def _add(self, dw: Tensor) -> None:
        assert self.dtype is not None
        begun = self._begun(dw)
        if begun is None:
            self._place.total = dw.to(self.dtype)
        else:
            begun.add_(dw)


TO_AUTOGRAD = WeightGradient()  # of a weight without a layer, or in code that is compiled


def add_products(
    gradients: Sequence[WeightGradient], matmuls: Sequence[LinearProducts], x: Tensor, *dys: Tensor
) -> list[Tensor | None]:
    """Hand over the products of layers that read the same x."""
    each = zip(gradients, matmuls, dys, strict=True)
    return [gradient.add_product(matmul, dy, x) for gradient, matmul, dy in each]


@contextmanager
def deferring(gradients: Sequence[WeightGradient]) -> Iterator[list[Job]]:
    """Collect the jobs of the backward that runs inside. All tp ranks must run them later in the
    same order."""
    jobs: list[Job] = []
    for gradient in gradients:
        gradient.defer_to(jobs)
    try:
        yield jobs
    finally:
        for gradient in gradients:
            gradient.defer_to(None)


@torch.no_grad()
def run_jobs(jobs: list[Job]) -> None:
    """Form the gradients and empty the list. The gathers of each job overlap the products of the
    job before it."""
    jobs.reverse()  # so that `pop` takes the first job, and each is freed after it has run
    started: Job | None = None
    while jobs:
        job = jobs.pop()
        job.start()
        if not job.gather_over:  # in between, it would leave the next gather without products
            job.finish()
            continue
        if started is not None:
            started.finish()
        started = job
    if started is not None:
        started.finish()
