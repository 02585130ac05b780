"""The mesh: the ranks that its sizes shard over, its axes as layers see them, and which of them lie
inside a node and which between nodes."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import init_device_mesh

from parallel.axes import MeshSizes
from parallel.collectives import start_all_gather
from parallel.config import ParallelConfig
from parallel.context import ContextParallel
from parallel.expert import ExpertParallel
from parallel.layer import TensorParallel
from parallel.placement import local_region
from proofs.parity.cases import Case
from runtime.start.announce import describe_nodes
from tools.rehearse.fake_gpu import one_rank
from training.balance import Balance


def test_meshes_that_shard_over_other_ranks_are_not_equal() -> None:
    """With zero_stage 0 nothing is sharded. Control: then a mesh without shards is the same."""
    for axes, replicas in (({"cp": 2, "ep": 2}, (2, 1)), ({"tp": 4, "ep": 2}, (1, 2)),
                           ({"dp_replicate": 4}, (4, 4))):  # fmt: skip
        world = max(axes.values())
        sharded, copied = (
            ParallelConfig(**axes, zero_stage=stage).mesh_sizes(world) for stage in (1, 0)
        )
        of_copied = copied.of_weights["dp_replicate"], copied.of_experts["ep_replicate"]
        assert of_copied == replicas
        assert (sharded == copied) == ("dp_replicate" in axes)


def test_tp_cp_and_ep_are_alike_and_one_rank_where_a_run_does_not_have_them() -> None:
    x = torch.ones(2)
    for rank, sizes, groups in (
        (5, MeshSizes(dp_shard=2, cp=2, tp=2, ep=4), ([4, 5], [5, 7], [4, 5, 6, 7])),
        (1, MeshSizes(tp=2), ([0, 1], [], [])),
    ):
        with one_rank(sizes, rank, "cpu", has_experts=sizes.ep > 1) as mesh:
            axes = TensorParallel.of(mesh, True), ContextParallel.of(mesh), ExpertParallel.of(mesh)
            for axis, ranks in zip(axes, groups, strict=True):
                gathered = start_all_gather(x, axis.group).wait()
                if ranks:
                    assert get_process_group_ranks(axis.group) == ranks
                    assert (axis.rank, len(gathered)) == (ranks.index(rank), 2 * axis.size)
                else:
                    assert (axis.size, axis.rank, gathered is x) == (1, 0, True)


def test_a_bias_of_a_router_is_whole_on_every_axis_also_on_one_that_was_added() -> None:
    axes = ("pp", "idle", "dp_replicate", "dp_shard", "tp")
    config = Case(MeshSizes(), router="sigmoid_bias").config()
    with one_rank(MeshSizes(), 0, "cpu") as mesh, patch("training.balance.WEIGHT_AXES", axes):
        root = init_device_mesh("cpu", (1,) * len(axes), mesh_dim_names=axes)
        balance = Balance(config, replace(mesh, root=root), {})
        balance.routers = {0: SimpleNamespace(bias=torch.zeros(2))}
        ((_, bias),) = balance.tensors()
        assert local_region(bias) == (range(2),)


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
