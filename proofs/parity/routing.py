"""Which experts the tokens chose, on the ranks and in the reference."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from model.router import routers_of
from parallel.collectives import by_rank
from parallel.expert import Routes
from training.step import TrainStep


class Choices(NamedTuple):
    """Of some tokens in one layer."""

    layer: int
    rows: Tensor  # of the global batch
    positions: Tensor  # in the sequence
    experts: Tensor  # [positions, rows, k], ascending


@contextmanager
def recording(step: TrainStep) -> Iterator[list[Choices]]:
    """Record what this rank's tokens choose. Forwards of a stage come in the order of their
    micro-batches. (A recomputation that chooses again is taken for one of them, and has other
    tokens.)"""
    found: list[Choices] = []
    train, parallel, mesh = step.config.train, step.config.parallel, step.mesh
    positions = step.cp.cut(torch.arange(train.seq_len), 0)
    if parallel.sequence_parallel:
        positions = by_rank(positions, mesh.tp.size(), parallel.tp_pieces)[mesh.tp.get_local_rank()]
    height, of_rank = train.micro_batch_size, train.global_batch_size // mesh.dp_size
    starts = range(mesh.dp_rank * of_rank, (mesh.dp_rank + 1) * of_rank, height)

    def recorder(layer: int, find: Callable[[Tensor, int], Routes]) -> Callable[..., Routes]:
        first_rows = cycle(starts)

        def recorded(logits: Tensor, sequences: int) -> Routes:
            routes = find(logits, sequences)
            rows = torch.arange(height) + next(first_rows)
            chosen = routes.chosen.sort(1).values.unflatten(0, (len(positions), height))
            found.append(Choices(layer, rows, positions, chosen.clone()))
            return routes

        return recorded

    with ExitStack() as patches:
        for stage in step.stages.values():
            for layer, router in routers_of(stage):
                recorded = recorder(layer, router.find)
                patches.enter_context(patch.object(router, "find", recorded))
        yield found


def assemble_choices(parts: Iterable[Choices], shape: tuple[int, ...]) -> Tensor:
    """The choices of all ranks [L, B, S, k]; −1 where no rank has one, −2 where two differ."""
    whole = torch.full(shape, -1)
    for layer, rows, positions, experts in parts:
        place = whole[layer][rows[:, None], positions[None, :]]
        mine = experts.transpose(0, 1)
        same = (place == -1) | (place == mine)
        whole[layer][rows[:, None], positions[None, :]] = torch.where(same, mine, -2)
    return whole
