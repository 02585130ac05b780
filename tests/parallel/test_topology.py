"""Which mesh axes lie inside a node and which between nodes."""

import pytest

from parallel.axes import MeshSizes
from runtime.start.announce import describe_nodes


@pytest.mark.parametrize(
    ("sizes", "ranks_per_node", "text"),
    [
        (MeshSizes(pp=4, dp_shard=8, tp=8), 8,
         "inside a node of 8 ranks: tp 8; between nodes: pp 4, dp_shard 8"),
        (MeshSizes(pp=2, dp_replicate=2, dp_shard=2, tp=2), 8,
         "inside a node of 8 ranks: tp 2, dp_shard 2, dp_replicate 2; between nodes: pp 2"),
        (MeshSizes(dp_replicate=2, tp=16), 8,
         "inside a node of 8 ranks: tp 8; between nodes: dp_replicate 2, tp 2"),
        (MeshSizes(pp=2, dp_shard=2, tp=2), 8, "all 8 ranks in one node"),
        (MeshSizes(dp_shard=8, tp=2, ep=4), 8,
         "inside a node of 8 ranks: tp 2, dp_shard 4; between nodes: dp_shard 2; ep 4 inside"),
        (MeshSizes(dp_shard=8, tp=2, ep=16), 8,
         "inside a node of 8 ranks: tp 2, dp_shard 4; between nodes: dp_shard 2; "
         "ep 16 between nodes"),
        # groups straddle nodes
        (MeshSizes(pp=2, tp=6), 4, "inside a node of 4 ranks: nothing; between nodes: pp 2, tp 6"),
    ],
)  # fmt: skip
def test_which_axes_a_node_holds(sizes: MeshSizes, ranks_per_node: int, text: str) -> None:
    assert describe_nodes(sizes, ranks_per_node).partition("\n")[0] == text


def test_a_tp_group_over_nodes_is_warned_of() -> None:
    """Exactly if a group (consecutive ranks) spans two nodes, as counted here rank by rank."""
    for tp, ranks_per_node in ((1, 8), (8, 8), (4, 8), (3, 8), (16, 8), (2, 1)):
        groups = [range(first, first + tp) for first in range(0, tp * ranks_per_node, tp)]
        spans = any(len({rank // ranks_per_node for rank in group}) > 1 for group in groups)
        said = describe_nodes(MeshSizes(tp=tp, dp_shard=16), ranks_per_node)
        assert (f"parallel.tp={tp} spans nodes" in said) == spans
