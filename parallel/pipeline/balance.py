"""Which stage gets how many layers: the split in which the slowest is fastest. Pure, no torch.

A pipeline runs at the speed of its slowest rank, and an even number of layers is not an even amount
of work: the first stage has the embedding besides, the last the head and the loss, which for a
large vocabulary cost as much as several layers.
"""

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, product
from typing import NamedTuple


class LayerCosts(NamedTuple):
    """Relative cost of what a stage may hold (forward and backward together)."""

    embedding: float
    blocks: tuple[float, ...]  # of every layer
    head: float  # with the final norm and the loss


def stage_costs(layers_per_stage: Sequence[int], costs: LayerCosts) -> list[float]:
    """The cost of each stage."""
    return _stages(layers_per_stage, costs, [0.0, *accumulate(costs.blocks)])


def _stages(layers: Sequence[int], costs: LayerCosts, before: Sequence[float]) -> list[float]:
    """`before`: the cost of all layers before each one."""
    ends = [0, *accumulate(layers)]
    stages = [before[end] - before[start] for start, end in pairwise(ends)]
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
    and the last gets one at least.

    Where layers differ, the search starts from two splits: the deal, and stages that end where as
    much work lies before them as the deal puts there. From each, it moves one layer at a time away
    from the slowest rank as long as that helps, and the better of the two results is returned. It
    is near the optimum, though not always the optimum.
    """
    mean = sum(costs.blocks) / len(costs.blocks)
    dealt = _dealt(len(costs.blocks), mean, costs, ranks_of_stages)
    if len(set(costs.blocks)) == 1:
        return dealt
    before = [0.0, *accumulate(costs.blocks)]
    cut = _cut(before, [mean * layers for layers in accumulate(dealt)])

    def ranks(split: list[int]) -> list[float]:
        return rank_costs(_stages(split, costs, before), ranks_of_stages)

    def slowness(split: list[int]) -> list[float]:
        """The slowest rank first, then the next: among splits whose slowest ranks are equal, the
        one with the faster others is the better place to search on from."""
        return sorted(ranks(split), reverse=True)

    def improved(split: list[int]) -> list[int]:
        while True:
            now = ranks(split)
            givers = [s for s, rank in enumerate(ranks_of_stages) if now[rank] == max(now)]
            better = min(_moves(split, givers), key=slowness, default=split)
            if slowness(better) >= slowness(split):
                return split
            split = better

    return min(improved(cut), improved(dealt), key=slowness)


def _dealt(
    number: int, cost: float, costs: LayerCosts, ranks_of_stages: Sequence[int]
) -> list[int]:
    """Deal `number` layers of the same `cost` to the stages."""
    stages = range(len(ranks_of_stages))
    layers = [_least(s, len(stages)) for s in stages]
    of_stage = [cost * n for n in layers]
    of_stage[0] += costs.embedding
    of_stage[-1] += costs.head
    of_rank = rank_costs(of_stage, ranks_of_stages)
    for _ in range(number - sum(layers)):
        s = min(stages, key=lambda s: (of_rank[ranks_of_stages[s]], of_stage[s], -s))
        layers[s] += 1
        of_stage[s] += cost
        of_rank[ranks_of_stages[s]] += cost
    return layers


def _cut(before: Sequence[float], targets: Sequence[float]) -> list[int]:
    """Layers of each stage, when each stage ends as near as possible to its target of work."""
    stages, number = len(targets), len(before) - 1
    ends = [0]
    for s, target in enumerate(targets[:-1]):
        first = ends[-1] + _least(s, stages)
        last = number - sum(_least(later, stages) for later in range(s + 1, stages))
        end = min(max(bisect(before, target), first), last)  # the first beyond it
        nearer = end > first and target - before[end - 1] <= before[end] - target
        ends.append(end - nearer)
    return [b - a for a, b in pairwise([*ends, number])]


def _least(stage: int, stages: int) -> int:
    """The fewest layers of a stage: one, but for the first and the last."""
    return int(0 < stage < stages - 1)


def _moves(layers: list[int], givers: Iterable[int]) -> Iterator[list[int]]:
    """The splits with a layer less in one of the `givers` and one more in another stage."""
    for giver, taker in product(givers, range(len(layers))):
        if giver != taker and layers[giver] > _least(giver, len(layers)):
            moved = list(layers)
            moved[giver] -= 1
            moved[taker] += 1
            yield moved


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
