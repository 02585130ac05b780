"""Which experts the tokens of a rank choose."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from unittest.mock import patch

import torch
from torch import Tensor

from model.router import routers_of
from parallel.collectives import by_rank
from training.step import TrainStep

# layer, rows of the global batch and positions in the sequence, experts [rows, positions, k]
Choices = tuple[int, tuple[Tensor, Tensor], Tensor]
Choose = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # BaseRouter.choose


@contextmanager
def recording(step: TrainStep) -> Iterator[list[Choices]]:
    """Record what this rank's tokens choose. Forwards of a stage come in the order of their
    micro-batches. (A recomputation that chooses again is taken for one of them, and has other
    tokens.)"""
    found: list[Choices] = []
    train, parallel, mesh = step.config.train, step.config.parallel, step.mesh
    positions = step.cp.cut(torch.arange(train.seq_len), 0)
    if parallel.sequence_parallel and mesh.tp.size > 1:  # else tp_pieces cuts nothing
        positions = by_rank(positions, mesh.tp.size, parallel.tp_pieces)[mesh.tp.rank]
    height, of_rank = train.micro_batch_size, train.global_batch_size // mesh.batch.size
    starts = range(mesh.batch.rank * of_rank, (mesh.batch.rank + 1) * of_rank, height)

    def recorder(layer: int, choose: Choose) -> Choose:
        first_rows = cycle(starts)

        def recorded(logits: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
            experts, counts = choose(logits, sequences)
            rows = torch.arange(height) + next(first_rows)
            chosen = experts.sort(1).values.unflatten(0, (len(positions), height))
            found.append((layer, (rows[:, None], positions), chosen.transpose(0, 1).double()))
            return experts, counts

        return recorded

    with ExitStack() as patches:
        for stage in step.stages.values():
            for layer, router in routers_of(stage):
                recorded = recorder(layer, router.choose)
                patches.enter_context(patch.object(router, "choose", recorded))
        yield found
