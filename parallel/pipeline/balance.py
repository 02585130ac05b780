"""Choose how many layers each stage gets, so that the slowest rank is as fast as possible. Pure
Python, no torch.

A pipeline runs at the speed of its slowest rank, and equal numbers of layers are not equal amounts
of work: the first stage also has the embedding, and the last has the head and the loss, which for a
large vocabulary cost as much as several layers.
"""

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, product
from typing import NamedTuple

# The costs of stages that one search adds up at most, which takes about a second; 512 layers that
# differ, in 128 stages, need 2**22.
MAX_SUMMED = 2**23


class LayerCosts(NamedTuple):
    """The relative costs of the parts of a model (forward and backward together)."""

    embedding: float
    blocks: tuple[float, ...]  # one for every layer
    head: float  # including the final norm and the loss


def stage_costs(
    layers_per_stage: Sequence[int], costs: LayerCosts, before: Sequence[float] = ()
) -> list[float]:
    """The cost of each stage. `before`: for each layer, the cost of all layers before it."""
    before = before or [0.0, *accumulate(costs.blocks)]
    ends = [0, *accumulate(layers_per_stage)]
    stages = [before[end] - before[start] for start, end in pairwise(ends)]
    stages[0] += costs.embedding
    stages[-1] += costs.head
    return stages


def even_split(num_layers: int, num_stages: int) -> list[int]:
    """Split the layers as evenly as possible. A surplus goes to the earliest stages after the
    first, which has the embedding, and then to the first."""
    least, surplus = divmod(num_layers, num_stages)
    inner_first = sorted(range(num_stages), key=lambda s: (s == num_stages - 1, s == 0, s))
    return [least + (s in inner_first[:surplus]) for s in range(num_stages)]


def balanced_split(costs: LayerCosts, ranks_of_stages: Sequence[int]) -> list[int]:
    """The split whose slowest rank has the least work and, of those, whose slowest stage has least.

    Layers are dealt one at a time, as if each had the mean cost, to the rank with the least work so
    far. If all layers have the same cost, this is optimal: in any other split a layer can be moved
    to where the deal put it without making the slowest rank slower. Within that rank the cheapest
    stage gets the layer, and of equally cheap stages the later one, which keeps the activations of
    fewer micro-batches. Every stage between the first and the last gets at least one layer.

    If layers differ in cost, the search starts from two splits: the deal, and a split in which
    about as much work precedes each stage's end as in the deal. From each it moves one layer at a
    time away from the slowest rank until no move helps (or, with hundreds of stages, MAX_SUMMED is
    reached), and returns the better of the two results. It is near the optimum, but not always
    optimal.
    """
    mean = sum(costs.blocks) / len(costs.blocks)
    dealt = _dealt(len(costs.blocks), mean, costs, ranks_of_stages)
    if len(set(costs.blocks)) == 1:
        return dealt
    before = [0.0, *accumulate(costs.blocks)]
    cut = _cut(before, [mean * layers for layers in accumulate(dealt)])

    def ranks(split: list[int]) -> list[float]:
        return rank_costs(stage_costs(split, costs, before), ranks_of_stages)

    def slowness(split: list[int]) -> list[float]:
        """The costs of the ranks, slowest first. Of two splits with equal slowest ranks, the one
        whose other ranks are faster is the better one to continue the search from."""
        return sorted(ranks(split), reverse=True)

    def improved(split: list[int]) -> list[int]:
        summed = 0
        while True:
            now = ranks(split)
            slowest = max(now)
            givers = [s for s, rank in enumerate(ranks_of_stages) if now[rank] == slowest]
            summed += len(givers) * len(split) ** 2
            if summed > MAX_SUMMED:
                return split
            better = min(_moves(split, givers), key=slowness, default=split)
            if slowness(better) >= slowness(split):
                return split
            split = better

    return min(improved(cut), improved(dealt), key=slowness)


def _dealt(
    number: int, cost: float, costs: LayerCosts, ranks_of_stages: Sequence[int]
) -> list[int]:
    """Deal `number` layers of the same `cost` to the stages; returns the layers of each."""
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
    """The layers of each stage if each stage ends as near as possible to its target of work."""
    stages, number = len(targets), len(before) - 1
    ends = [0]
    for s, target in enumerate(targets[:-1]):
        first = ends[-1] + _least(s, stages)
        last = number - sum(_least(later, stages) for later in range(s + 1, stages))
        end = min(max(bisect(before, target), first), last)  # the first end beyond the target
        nearer = end > first and target - before[end - 1] <= before[end] - target
        ends.append(end - nearer)
    return [b - a for a, b in pairwise([*ends, number])]


def _least(stage: int, stages: int) -> int:
    """The fewest layers that a stage may have: none for the first and the last, else one."""
    return int(0 < stage < stages - 1)


def _moves(layers: list[int], givers: Iterable[int]) -> Iterator[list[int]]:
    """All splits with one layer less in one of the `givers` and one more in another stage."""
    for giver, taker in product(givers, range(len(layers))):
        if giver != taker and layers[giver] > _least(giver, len(layers)):
            moved = list(layers)
            moved[giver] -= 1
            moved[taker] += 1
            yield moved


def rank_costs(of_stages: Sequence[float], ranks_of_stages: Sequence[int]) -> list[float]:
    """The cost of each rank: the sum over its stages."""
    ranks = [0.0] * (max(ranks_of_stages) + 1)
    for cost, rank in zip(of_stages, ranks_of_stages, strict=True):
        ranks[rank] += cost
    return ranks


def imbalance(
    layers_per_stage: Sequence[int], costs: LayerCosts, ranks_of_stages: Sequence[int]
) -> float:
    """The slowest rank's cost divided by the mean: 1 is perfect, and a step of many micro-batches
    takes longer by this factor."""
    ranks = rank_costs(stage_costs(layers_per_stage, costs), ranks_of_stages)
    return max(ranks) * len(ranks) / sum(ranks)
