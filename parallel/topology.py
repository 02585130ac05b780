"""Which axes of the mesh lie inside a node, and what it costs where tensor parallelism does not.

torchrun gives a node consecutive ranks, so a node of N ranks holds N neighbours of the mesh's order
(axes.py). With tp 8, pp 4, dp_shard 8 and 8 ranks per node:

    inside a node of 8 ranks: tp 8; between nodes: pp 4, dp_shard 8
"""

from hardware import H100
from parallel.axes import MeshSizes


def describe_nodes(sizes: MeshSizes, ranks_per_node: int) -> str:
    """One line: how much of each axis is inside a node and how much between nodes; axes of size 1
    are left out.

    Args:
        sizes: of the mesh.
        ranks_per_node: processes of every node (torchrun's LOCAL_WORLD_SIZE).
    """
    inside, between, room = [], [], ranks_per_node
    for name, size in reversed(sizes.by_axis().items()):  # innermost first
        if size == 1:
            continue
        if room % size == 0:
            here = size
        else:
            here = room if size % room == 0 else 1  # whole nodes side by side; or it straddles them
        room = room // here if here == size else 1
        inside += [f"{name} {here}"] if here > 1 else []
        between += [f"{name} {size // here}"] if here < size else []
    if not between:
        return f"all {ranks_per_node} ranks in one node"
    return f"inside a node of {ranks_per_node} ranks: {', '.join(inside) or 'nothing'}; between nodes: {', '.join(between[::-1])}"


def tp_between_nodes(tp: int, ranks_per_node: int, bytes_per_step: float) -> str:
    """A warning that names the cost, if any tensor-parallel group has ranks in two nodes; else the
    empty string.

    Args:
        tp: size of the axis; its groups are consecutive ranks.
        ranks_per_node: processes of every node.
        bytes_per_step: what tp_bytes_per_step says.
    """
    if ranks_per_node % tp == 0:
        return ""
    network = H100.network_bytes_per_second
    slow, fast = bytes_per_step / network, bytes_per_step / H100.node_bytes_per_second
    fits = [size for size in range(1, ranks_per_node + 1) if ranks_per_node % size == 0]
    sent = f"{bytes_per_step / 1e9:,.1f} GB"
    return (
        f"warning: parallel.tp={tp} reaches over nodes of {ranks_per_node} ranks: each rank sends {sent} for it in a step, and"
        f" computing waits for most of that: {slow:.2g} s at {network / 1e9:g} GB/s between nodes, {fast:.2g} s over"
        f" NVLink; choose parallel.tp from {fits}"
    )


def tp_bytes_per_step(
    tp: int, *, tokens: int, dim: int, layers: int, bytes_per_number: int, sequence_parallel: bool
) -> float:
    """What one rank sends for the blocks' tensor parallelism in a step, forward and backward.

    The collectives of a block, each over tokens × dim numbers of a micro-batch (Megatron-LM,
    https://arxiv.org/abs/1909.08053, section 3; with sequence parallelism Korthikanti et al.,
    https://arxiv.org/abs/2205.05198, section 4.2.2):

        forward    2 all-reduces; or 2 all-gathers + 2 reduce-scatters
        backward   2 all-reduces; or the same, and 2 all-gathers of what forward did not keep

    An all-gather or reduce-scatter by a ring sends (tp − 1) / tp of that, an all-reduce twice as
    much. The embedding and the head come once and are left out; so is recomputation.

    Args:
        tp: size of the axis.
        tokens: of one step, on one data-parallel rank.
        dim: D.
        layers: blocks of one rank.
        bytes_per_number: of activations.
        sequence_parallel: as in the configuration.
    """
    units = 10 if sequence_parallel else 8
    return units * (tp - 1) / tp * tokens * dim * bytes_per_number * layers
