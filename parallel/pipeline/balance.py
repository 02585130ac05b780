"""Which stage gets how many layers: the split in which the slowest is fastest. Pure, no torch.

A pipeline runs at the speed of its slowest rank, and an even number of layers is not an even amount
of work: the first stage has the embedding besides, the last the head and the loss, which for a
large vocabulary cost as much as several layers.
"""

from collections.abc import Sequence
from typing import NamedTuple


class LayerCosts(NamedTuple):
    """Relative cost, per token, of what a stage may hold (forward and backward together)."""

    embedding: float
    block: float
    head: float  # with the final norm and the loss


def stage_costs(layers_per_stage: Sequence[int], costs: LayerCosts) -> list[float]:
    """The cost of each stage."""
    stages = [layers * costs.block for layers in layers_per_stage]
    stages[0] += costs.embedding
    stages[-1] += costs.head
    return stages


def even_split(num_layers: int, num_stages: int) -> list[int]:
    """As many layers for every stage; what is left goes to the earliest stages but the first, which
    has the embedding."""
    least, surplus = divmod(num_layers, num_stages)
    inner_first = sorted(range(num_stages), key=lambda s: (s == num_stages - 1, s == 0, s))
    return [least + (s in inner_first[:surplus]) for s in range(num_stages)]


def balanced_split(num_layers: int, costs: LayerCosts, ranks_of_stages: Sequence[int]) -> list[int]:
    """The split whose slowest rank has least to do and, among those, whose slowest stage does.

    Layers are alike, so dealing them one at a time to the rank that then has least is optimal: in
    any other split a layer can be moved to where the deal put it without making the slowest rank
    slower. Of a rank's stages the cheapest gets it; of equals the later, which keeps fewer
    micro-batches' activations. Every stage between the first and the last gets one at least.
    """
    stages = range(len(ranks_of_stages))
    layers = [int(0 < s < len(stages) - 1) for s in stages]
    for _ in range(num_layers - sum(layers)):
        alone = stage_costs(layers, costs)
        of_rank = rank_costs(alone, ranks_of_stages)
        layers[min(stages, key=lambda s: (of_rank[ranks_of_stages[s]], alone[s], -s))] += 1
    return layers


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
