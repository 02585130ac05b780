"""Which mesh axes lie inside a node, and what tensor parallelism across nodes costs.

torchrun gives each node consecutive ranks, so a node of N ranks holds N consecutive positions in
the order of the mesh (parallel/axes.py). For example, tp 8, pp 4, dp_shard 8 with 8 ranks per node:

    inside a node of 8 ranks: tp 8; between nodes: pp 4, dp_shard 8
"""

from costs.summary import mean_of_blocks
from hardware import H100
from parallel.axes import MeshSizes
from parallel.mesh import Mesh
from parallel.pipeline.balance import even_split, imbalance
from settings.config import Config


def describe_nodes(sizes: MeshSizes, ranks_per_node: int) -> str:
    """Describe in one line how much of each axis is inside a node and how much between nodes; axes
    of size 1 are left out.

    Args:
        sizes: the sizes of the mesh axes.
        ranks_per_node: processes on each node (torchrun's LOCAL_WORLD_SIZE).
    """
    inside, between, room = [], [], ranks_per_node
    for name, size in reversed(sizes.by_axis().items()):  # innermost first
        if size == 1:
            continue
        if room % size == 0:
            here = size
        else:
            here = room if size % room == 0 else 1  # 1: a group would straddle nodes unevenly
        room = room // here if here == size else 1
        inside += [f"{name} {here}"] if here > 1 else []
        between += [f"{name} {size // here}"] if here < size else []
    if not between:
        return f"all {ranks_per_node} ranks in one node"
    near, far = ", ".join(inside) or "nothing", ", ".join(between[::-1])
    said = f"inside a node of {ranks_per_node} ranks: {near}; between nodes: {far}"
    if sizes.ep == 1:
        return said
    # a group of ep is consecutive ranks, of the axes above
    return f"{said}; ep {sizes.ep} {'between nodes' if ranks_per_node % sizes.ep else 'inside'}"


def tp_spans_nodes(tp: int, ranks_per_node: int) -> bool:
    """Whether any tensor-parallel group, `tp` consecutive ranks, has ranks in two nodes."""
    return ranks_per_node % tp != 0


def tp_between_nodes(tp: int, ranks_per_node: int, bytes_per_step: float) -> str:
    """Return a warning that states the cost of tensor-parallel groups with ranks on two nodes.

    Args:
        tp: size of the tensor-parallel axis; its groups are consecutive ranks.
        ranks_per_node: processes on each node.
        bytes_per_step: the result of tp_bytes_per_step.
    """
    network = H100.network_bytes_per_second
    slow, fast = bytes_per_step / network, bytes_per_step / H100.node_bytes_per_second
    fits = [size for size in range(1, ranks_per_node + 1) if ranks_per_node % size == 0]
    sent = f"{bytes_per_step / 1e9:,.1f} GB"
    return (
        f"warning: parallel.tp={tp} spans nodes of {ranks_per_node} ranks: each rank sends {sent}"
        f" for it per step, and computation waits for most of that: {slow:.2g} s at"
        f" {network / 1e9:g} GB/s between nodes, {fast:.2g} s over NVLink; choose parallel.tp from"
        f" {fits}"
    )


def tp_bytes_per_step(config: Config, dp_size: int) -> float:
    """Bytes that one rank sends per step for the tensor parallelism of its blocks, forward and
    backward, as recorded from their code (costs/units.py). The embedding and the head, which occur
    once, are left out.

    Args:
        config: the configuration of the run.
        dp_size: number of data-parallel ranks.
    """
    layers = -(-config.model.num_layers // config.parallel.pp)
    each = mean_of_blocks(config.setting(), lambda block: block.bytes_sent)
    return each * layers * config.num_microbatches(dp_size)


def describe_places(config: Config, mesh: Mesh, ranks_per_node: int) -> str:
    """Describe which axes lie inside a node, with a second line that warns if tensor parallelism
    does not."""
    lines, tp = [describe_nodes(mesh.sizes, ranks_per_node)], config.parallel.tp
    if tp_spans_nodes(tp, ranks_per_node):
        lines.append(
            tp_between_nodes(tp, ranks_per_node, tp_bytes_per_step(config, mesh.batch.size))
        )
    return "\n".join(lines)


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
