"""Replicas that are no longer equal are found, and the rank that differs is named."""

from dataclasses import replace
from functools import partial

import pytest
import torch.distributed as dist

from parallel.axes import MeshSizes
from proofs.parity.cases import Case
from runtime.health.replicas import ReplicasDiffer, check_replicas, few, odd_copies
from tests import runs
from tests.health.faulty_runs import flip_a_bit
from tests.steps import make_step, rows_of


def differing(case: Case, rank: int, name: str) -> str:
    """Train one step, check the replicas, flip one bit of the tensor `name` on `rank`, and return
    the message of the next check (empty if it finds nothing)."""
    step = make_step(replace(case, num_microbatches=case.layout.pp))
    step(0, *rows_of(step))
    check_replicas(step)
    if dist.get_rank() == rank:
        flip_a_bit(step, name)
    try:
        check_replicas(step)
    except ReplicasDiffer as found:
        return str(found)
    return ""


thorough = partial(pytest.param, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("case", "rank", "name", "said"),
    [
        (Case(MeshSizes(tp=2)), 1, "norm.weight",
         "ranks 0, 1, copies over tp, hold different numbers"),
        thorough(Case(MeshSizes(tp=8), num_kv_heads=4), 5, "attention.key.weight",
                 "rank 5 differs from its copies"),
        thorough(Case(MeshSizes(dp_replicate=4), zero_stage=0), 3, "embedding.weight.exp_avg_sq",
                 "rank 3 differs from its copies"),
        thorough(Case(MeshSizes(dp_replicate=4, dp_shard=2), zero_stage=3), 4,
                 "query.weight.exp_avg", "over dp_replicate (ranks 0, 2, 4, 6)"),
        (Case(MeshSizes(pp=2), tie_embeddings=True), 1, "embedding.weight",
         "ranks 0, 1, copies over pp, hold different numbers"),
        (Case(MeshSizes(pp=2, dp_replicate=2), zero_stage=2), 3, "up.weight",
         "ranks 2, 3, copies over dp_replicate, hold different numbers"),
        (Case(MeshSizes(dp_replicate=2, tp=2, ep=2), router="softmax"), 3, "experts.up.weight",
         "ranks 1, 3, copies over ep_replicate, hold different numbers"),
        thorough(Case(MeshSizes(dp_replicate=4, dp_shard=2, ep=2), router="softmax"), 4,
                 "experts.down.weight.exp_avg", "over ep_replicate (ranks 0, 2, 4, 6)"),
        (Case(MeshSizes(dp_shard=4, ep=2), router="sigmoid_bias"), 2, "router.bias",
         "rank 2 differs from its copies over dp_shard (ranks 0, 1, 2, 3)"),
        # controls: a shard and the experts of one rank have no copies, so nothing is compared
        (Case(MeshSizes(dp_shard=2)), 1, "down.weight", ""),
        (Case(MeshSizes(dp_shard=2, ep=2), router="softmax"), 1, "down.weight", ""),
    ],
    ids=str,
)  # fmt: skip
def test_a_flipped_bit_names_its_rank(ranks, case, rank, name, said):
    (found,) = {*ranks.run(differing, case.world, case, rank, name)}  # every rank says the same
    assert said in found if said else found == ""


def test_half_of_the_copies_are_no_majority():
    values = (1, 1, 2, 2)
    (said,) = odd_copies([{("tp", 0): value} for value in values])
    assert said == "ranks 0, 1, 2, 3, copies over tp, hold different numbers"
    assert odd_copies([{("tp", 2 * (rank // 2)): value} for rank, value in enumerate(values)]) == []


def test_what_is_said_of_many_ranks_is_short():
    """The monitor's pipe takes 64 KiB at once, and a command's environment twice as much."""
    half = [{("dp_replicate", 0): rank % 2} for rank in range(16_384)]
    (said,) = odd_copies(half)
    assert said.startswith("ranks 0, 1, 2, ")
    assert "19 and 16364 more, copies over" in said
    few_odd = odd_copies([{("tp", 0): int(rank < 4096)} for rank in range(16_384)])
    assert len(few_odd) == 4096
    assert len(few(few_odd, "; ")) < 10_000


def test_a_comparison_without_a_save_is_no_time_of_saving(ranks, data, tmp_path):
    """Else what a save costs would be overstated (tools.report)."""
    config = runs.write_config(tmp_path, data, guard={"replica_interval": 1}, train={"steps": 3})
    runs.run(ranks, 1, config, "checkpoint.interval=0", "run.log_interval=1")
    spent = [{*event["seconds"]} for event in runs.events_of(tmp_path / "run", "spent")]
    assert "examination" in set.union(*spent)
    assert ["saving" in causes for causes in spent].count(True) == 1
