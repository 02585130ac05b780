"""Weight gradients that are formed later than their backward.

Only the optimizer needs the gradient of a weight, whereas other ranks wait for the gradient of a
layer's *input*. So a pipeline schedule may split backward and form weight gradients later, when a
rank would otherwise be idle (zero bubble: Qi et al. 2023, https://arxiv.org/abs/2401.10241). The
backward of a linear layer then leaves a job for the runner. The job keeps the two tensors of the
product, the layer's input and the gradient of its output (this rank's part of a tensor that
sequence parallelism splits). The embedding does the same. A norm's gradient, computed together with
that of its input, and the head's, computed in forward, become jobs too, so that all gradients of a
micro-batch are reduced together.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.collectives import ONE_RANK, Pending, start_all_gather


class Job:
    """The rest of a weight gradient's work: `form(*tensors)`. The job lets go of each tensor as
    soon as nothing needs it.

    Args:
        form: hands the gradient over (weight_gradient.py).
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
