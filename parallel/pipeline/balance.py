"""Which stage gets how many layers: the split in which the slowest is fastest. Pure, no torch.

A pipeline runs at the speed of its slowest rank, and an even number of layers is not an even amount
of work: the first stage has the embedding besides, the last the head and the loss, which for a
large vocabulary cost as much as several layers.
"""

import itertools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple


class LayerCosts(NamedTuple):
    """Relative cost of what a stage may hold (forward and backward together)."""

    embedding: float
    blocks: tuple[float, ...]  # of every layer
    head: float  # with the final norm and the loss


def stage_costs(layers_per_stage: Sequence[int], costs: LayerCosts) -> list[float]:
    """The cost of each stage."""
    ends = list(accumulate(layers_per_stage))
    stages = [
        sum(costs.blocks[end - layers : end])
        for end, layers in zip(ends, layers_per_stage, strict=True)
    ]
    stages[0] += costs.embedding
    stages[-1] += costs.head
    return stages


def even_split(num_layers: int, num_stages: int) -> list[int]:
    """As many layers for every stage; what is left goes to the earliest stages but the first, which
    has the embedding."""
    least, surplus = divmod(num_layers, num_stages)
    inner_first = sorted(range(num_stages), key=lambda s: (s == num_stages - 1, s == 0, s))
    return [least + (s in inner_first[:surplus]) for s in range(num_stages)]


def balanced_split(costs: LayerCosts, ranks_of_stages: Sequence[int]) -> list[int]:
    """The split whose slowest rank has least to do and, among those, whose slowest stage does.

    Layers are dealt one at a time, as if all cost their mean, to the rank that then has least.
    Where layers are alike that is optimal: in any other split a layer can be moved to where the
    deal put it without making the slowest rank slower. Of a rank's stages the cheapest gets it; of
    equals the later, which keeps fewer micro-batches' activations. Every stage between the first
    and the last gets one at least. Where layers differ, one is then moved from a stage to another
    as long as that helps.
    """
    stages, number = range(len(ranks_of_stages)), len(costs.blocks)
    mean = costs._replace(blocks=(sum(costs.blocks) / number,) * number)
    layers = [int(0 < s < len(stages) - 1) for s in stages]
    for _ in range(number - sum(layers)):
        alone = stage_costs(layers, mean)
        of_rank = rank_costs(alone, ranks_of_stages)
        layers[min(stages, key=lambda s: (of_rank[ranks_of_stages[s]], alone[s], -s))] += 1
    if len(set(costs.blocks)) == 1:
        return layers

    def slowest(split: list[int]) -> list[float]:
        """Of the ranks, first to last: two splits are compared by the first that differs."""
        return sorted(rank_costs(stage_costs(split, costs), ranks_of_stages), reverse=True)

    while True:
        better = min((split for split in _moves(layers)), key=slowest, default=layers)
        if slowest(better) >= slowest(layers):
            return layers
        layers = better


def _moves(layers: list[int]) -> Iterator[list[int]]:
    """The splits with one layer less in a stage and one more in another."""
    stages = range(len(layers))
    for a, b in itertools.permutations(stages, 2):
        if layers[a] > int(0 < a < len(layers) - 1):
            yield [n - (s == a) + (s == b) for s, n in enumerate(layers)]


def rank_costs(of_stages: Sequence[float], ranks_of_stages: Sequence[int]) -> list[float]:
    """The sum over each rank's stages."""
    ranks = [0.0] * (max(ranks_of_stages) + 1)
    for cost, rank in zip(of_stages, ranks_of_stages, strict=True):
        ranks[rank] += cost
    return ranks


def imbalance(
    layers_per_stage: Sequence[int], costs: LayerCosts, ranks_of_stages: Sequence[int]
) -> float:
    """The slowest rank's cost over the mean: 1 is perfect, and a long step takes that much
    longer."""
    ranks = rank_costs(stage_costs(layers_per_stage, costs), ranks_of_stages)
    return max(ranks) * len(ranks) / sum(ranks)
