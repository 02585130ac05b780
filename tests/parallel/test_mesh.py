"""The mesh: which ranks its sizes shard over, and its axes as layers see them."""

import torch
import torch.distributed as dist

from parallel.axes import MeshSizes
from parallel.collectives import by_rank, start_all_gather
from parallel.config import ParallelConfig
from parallel.context import ContextParallel
from parallel.expert import ExpertParallel
from parallel.layer import TensorParallel
from parallel.mesh import Mesh
from tools.rehearse.fake_gpu import one_rank


def test_meshes_that_shard_other_ranks_are_not_equal() -> None:
    """With zero_stage 0, ranks of cp, and those that have the same experts, hold replicas."""
    for axes, replicas, of_experts in (
        ({"cp": 2, "ep": 2}, 2, 1), ({"tp": 4, "ep": 2}, 1, 2), ({"dp_replicate": 4}, 4, 4),
    ):  # fmt: skip
        shards, copies = (
            ParallelConfig(**axes, zero_stage=stage).mesh_sizes(max(axes.values()))
            for stage in (1, 0)
        )
        assert copies.of_weights["dp_replicate"] == replicas
        assert copies.of_experts["ep_replicate"] == of_experts
        same = (shards.of_weights, shards.of_experts) == (copies.of_weights, copies.of_experts)
        assert (shards == copies) == same == ("dp_replicate" in axes)  # the control: nothing to cut


def axes_of_layers(mesh: Mesh):
    return TensorParallel.of(mesh, True), ContextParallel.of(mesh), ExpertParallel.of(mesh)


def test_an_axis_that_a_run_does_not_have_is_one_rank() -> None:
    x = torch.ones(2)
    with one_rank(MeshSizes(dp_shard=2, cp=2, tp=2, ep=4), 5, "cpu", has_experts=True) as mesh:
        axes = axes_of_layers(mesh)
        ranks = [dist.get_process_group_ranks(axis.group) for axis in axes]
        assert ranks == [[4, 5], [5, 7], [4, 5, 6, 7]]
        assert [ranks[axis.rank] for axis, ranks in zip(axes, ranks, strict=True)] == [5, 5, 5]
        assert [len(start_all_gather(x, axis.group).wait()) for axis in axes] == [4, 4, 8]
    with one_rank(MeshSizes(tp=2), 1, "cpu") as mesh:
        tp, *others = axes_of_layers(mesh)
        assert len(start_all_gather(x, tp.group).wait()) == 4  # the control
        assert [(axis.size, axis.rank) for axis in others] == [(1, 0)] * 2
        assert all(start_all_gather(x, axis.group).wait() is x for axis in others)


def test_the_length_on_a_rank_is_that_of_its_part() -> None:
    for size, rank in ((1, 0), (2, 1), (4, 0), (4, 3)):
        tp, cp = TensorParallel(size, rank), ContextParallel(size, rank)
        assert cp.local_length(48) == cp.cut(torch.arange(48), 0).numel() == 48 // size
        assert tp.local_length(48) == by_rank(torch.arange(48), size, pieces=2)[rank].numel()
        # the control
        assert TensorParallel(size, rank, sequence_parallel=False).local_length(48) == 48
