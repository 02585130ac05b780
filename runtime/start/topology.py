"""Which mesh axes lie inside a node, and how the blocks are split into stages.

torchrun gives each node consecutive ranks, so a node of N ranks holds N consecutive positions in
the order of the mesh (parallel/axes.py). For example, tp 8, pp 4, dp_shard 8 with 8 ranks per node:

    inside a node of 8 ranks: tp 8; between nodes: pp 4, dp_shard 8
"""

import math

from parallel.axes import MeshSizes
from parallel.pipeline.balance import even_split, imbalance
from settings.config import Config


def describe_nodes(sizes: MeshSizes, ranks_per_node: int) -> str:
    """Describe in one line how much of each axis is inside a node and how much between nodes; axes
    of size 1 are left out. A second line warns if groups of tp, which are consecutive ranks, span
    nodes.

    ranks_per_node: torchrun's LOCAL_WORLD_SIZE.
    """
    inside, between, room = [], [], ranks_per_node
    for name, size in reversed(sizes.by_axis().items()):  # innermost first
        if size == 1:
            continue
        here = math.gcd(size, room)
        if here not in (size, room):
            here = 1  # a group would straddle nodes unevenly
        room = room // here if here == size else 1
        inside += [f"{name} {here}"] if here > 1 else []
        between += [f"{name} {size // here}"] if here < size else []
    if not between:
        return f"all {ranks_per_node} ranks in one node"
    near, far = ", ".join(inside) or "nothing", ", ".join(between[::-1])
    said = f"inside a node of {ranks_per_node} ranks: {near}; between nodes: {far}"
    if sizes.ep > 1:  # a group of ep is consecutive ranks, of the axes above
        said += f"; ep {sizes.ep} {'between nodes' if ranks_per_node % sizes.ep else 'inside'}"
    if ranks_per_node % sizes.tp:
        fits = [size for size in range(1, ranks_per_node + 1) if ranks_per_node % size == 0]
        said += f"\nwarning: parallel.tp={sizes.tp} spans nodes: every layer waits for the network"
        said += f"; choose parallel.tp from {fits}"
    return said


def describe_stages(config: Config) -> str:
    """Describe how the blocks are split into stages, for the log: `4 stages of 8, 9, 9, 6 blocks:
    the slowest rank computes 5% more than the mean (even split: 19%)`."""
    costs = config.layer_costs()
    split = [len(layers) for layers in config.split_layers()]
    even = even_split(config.model.num_layers, len(split))
    ranks = config.parallel.ranks_of_stages
    over, over_even = (imbalance(s, costs, ranks) - 1 for s in (split, even))
    each = len(set(split)) == 1
    blocks = f"{split[0]} blocks each" if each else f"{', '.join(map(str, split))} blocks"
    beside = "" if split == even else f" (even split: {over_even:.0%})"
    said = f"{len(split)} stages of {blocks}: the slowest rank computes {over:.0%} more"
    return f"{said} than the mean{beside}"
