"""Which mesh axes lie inside a node and which between nodes, and the cost of a tensor-parallel
group that spans nodes. (test_collectives.py compares its bytes with a real block's.)"""

import pytest

from hardware import H100
from parallel.axes import MeshSizes
from runtime.start.topology import describe_nodes, tp_between_nodes, tp_spans_nodes


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
    assert describe_nodes(sizes, ranks_per_node) == text


def test_a_group_over_nodes_is_warned_of() -> None:
    """There is a warning exactly if a tp group (consecutive ranks) spans two nodes, as counted
    here rank by rank."""
    for tp, ranks_per_node in ((1, 8), (8, 8), (4, 8), (3, 8), (16, 8), (2, 1)):
        groups = [range(first, first + tp) for first in range(0, tp * ranks_per_node, tp)]
        spans = any(len({rank // ranks_per_node for rank in group}) > 1 for group in groups)
        assert tp_spans_nodes(tp, ranks_per_node) == spans


def test_the_warning_names_the_cost() -> None:
    text = tp_between_nodes(16, 8, 3 * H100.network_bytes_per_second)
    assert "parallel.tp=16" in text
    assert "150.0 GB for it per step" in text
    assert "3 s at 50 GB/s" in text
    assert "[1, 2, 4, 8]" in text
