"""Which stage gets how many layers: the split whose slowest stage is fastest. Pure, no torch.

A pipeline runs at the speed of its slowest stage, and an even number of layers is not an even amount of work: the first stage
has the embedding besides, the last the head and the loss, which for a large vocabulary cost as much as several layers.
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
    """As many layers for every stage; what is left goes to the earliest stages but the first, which has the embedding."""
    surplus = sorted(range(num_stages), key=lambda s: (s == num_stages - 1, s == 0, s))[: num_layers % num_stages]
    return [num_layers // num_stages + (s in surplus) for s in range(num_stages)]


def balanced_split(num_layers: int, num_stages: int, costs: LayerCosts) -> list[int]:
    """The split with the cheapest slowest stage.

    Layers are alike, so dealing them one at a time to the stage that is then cheapest is optimal: in any other split a layer
    can be moved to where the deal put it without making the slowest stage slower. Of equals the later stage gets it, which keeps
    fewer micro-batches' activations. Every stage between the first and the last gets one at least.
    """
    layers = [int(0 < s < num_stages - 1) for s in range(num_stages)]
    for _ in range(num_layers - sum(layers)):
        then = [cost + costs.block for cost in stage_costs(layers, costs)]
        layers[min(range(num_stages), key=lambda s: (then[s], -s))] += 1
    return layers


def imbalance(layers_per_stage: Sequence[int], costs: LayerCosts) -> float:
    """The slowest stage's cost over the mean: 1 is perfect, and a long pipeline takes that much longer."""
    stages = stage_costs(layers_per_stage, costs)
    return max(stages) * len(stages) / sum(stages)
