"""Experts under a process group as strict as NCCL (tools/strict): all-to-alls whose ranks send
different numbers of rows, and planted splits that disagree."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from parallel.axes import MeshSizes
from tools.parity.cases import Case
from tools.parity.expert_cases import STEPS, extreme_cases
from tools.parity.row import line
from tools.parity.run import check
from tools.ranks import RankError, Ranks
from tools.strict.referee import Operation, Referee, Wrong


@pytest.fixture(scope="module", params=["strict", "strict_shared"])
def strict(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(8, timeout=200, backend=request.param) as pool:
        yield pool


def send_rows(rows: list[list[int]]) -> list[float]:
    """`rows[i][j]` rows of the number i go from rank i to rank j. What this rank receives."""
    rank, world = dist.get_rank(), dist.get_world_size()
    receive = [rows[other][rank] for other in range(world)]
    x = torch.full((sum(rows[rank]), 2), float(rank))
    out = torch.full((sum(receive), 2), -1.0)
    dist.all_to_all_single(out, x, receive, rows[rank])
    return out[:, 0].tolist()


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
        [[2, 0, 1], [4, 1, 0], [0, 3, 2]],
        [[0, 5, 0], [0, 2, 0], [0, 1, 0]],  # all to rank 1
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    ],
    ids=["even", "uneven", "to_one_rank", "none"],
)
def test_it_carries_uneven_and_empty_splits(strict: Ranks, rows: list[list[int]]) -> None:
    for rank, received in enumerate(strict.run(send_rows, 3, rows)):
        assert received == [float(i) for i in range(3) for _ in range(rows[i][rank])]


def even_splits() -> list[float]:
    """Without splits, a rank's rows are for all ranks alike."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.empty(2 * world)
    dist.all_to_all_single(out, torch.full((2 * world,), float(rank)))
    return out.tolist()


def test_it_carries_all_to_alls_without_splits(strict: Ranks) -> None:
    assert strict.run(even_splits, 2) == [[0.0, 0.0, 1.0, 1.0]] * 2


def splits_that_disagree() -> None:
    """Rank 0 sends two rows to rank 1, which expects one."""
    if dist.get_rank() == 0:
        dist.all_to_all_single(torch.empty(2, 4), torch.ones(3, 4), [1, 1], [1, 2])
    else:
        dist.all_to_all_single(torch.empty(2, 4), torch.ones(2, 4), [1, 1], [1, 1])


def uneven_rows_without_splits() -> None:
    """Each rank has as many rows as it wants, and takes what it sends for what it receives."""
    rows = 2 * (1 + dist.get_rank())
    dist.all_to_all_single(torch.empty(rows), torch.ones(rows))


def other_widths() -> None:
    x = torch.ones(2, 4 + dist.get_rank())
    dist.all_to_all_single(torch.empty_like(x), x, [1, 1], [1, 1])


def other_dtypes() -> None:
    x = torch.ones(2, 4, dtype=(torch.float32, torch.int32)[dist.get_rank()])
    dist.all_to_all_single(torch.empty_like(x), x, [1, 1], [1, 1])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (splits_that_disagree, r"rank 0 sends 2 rows over .*, and rank 1 expects 1"),
        (uneven_rows_without_splits, r"rank 0 sends 1 rows over .*, and rank 1 expects 2"),
        (other_widths, "different collectives"),
        (other_dtypes, "different collectives"),
    ],
)
def test_a_planted_fault_is_found(strict: Ranks, fault: Callable[[], None], said: str) -> None:
    with pytest.raises(RankError, match=said):
        strict.run(fault, 2)


def all_to_all(sends: tuple[int, ...], receives: tuple[int, ...]) -> Operation:
    return Operation("all_to_all_single", sends=sends, receives=receives)


def test_the_referee_compares_rows_of_ranks_of_the_world() -> None:
    """A communicator's rank 1 may be another rank of the world."""
    referee, members = Referee(6), [3, 5]
    assert referee.begins(5, "q", "g", members, all_to_all((4, 0), (1, 0))) == []
    released = referee.begins(3, "q", "g", members, all_to_all((2, 1), (2, 4)))
    assert sorted(released) == [(3, "q"), (5, "q")]
    referee.begins(5, "q", "g", members, all_to_all((4, 0), (1, 0)))
    with pytest.raises(Wrong, match="rank 5 sends 4 rows over g, and rank 3 expects 3"):
        referee.begins(3, "q", "g", members, all_to_all((2, 1), (2, 3)))


# --- Lattice itself ---

BASE = Case(MeshSizes(), router="sigmoid_bias", router_losses=True, num_shared_experts=1)
LAYOUTS = [
    replace(BASE, layout=MeshSizes(pp=2, dp_shard=2, tp=2, ep=4), schedule="zb_h1", zero_stage=3),
    replace(BASE, layout=MeshSizes(pp=2, cp=2, ep=2), schedule="zb_v", stages_per_rank=2,
            activation_checkpointing="selective"),
    replace(BASE, layout=MeshSizes(dp_replicate=2, tp=2, ep=2), zero_stage=2,
            activation_checkpointing="full", document_mask=True),
    replace(BASE, layout=MeshSizes(pp=2, dp_shard=4, ep=2), schedule="interleaved_1f1b",
            stages_per_rank=2, zero_stage=2, num_dense_layers=1),
    replace(BASE, layout=MeshSizes(cp=2, tp=2, ep=4), tp_pieces=2, router="softmax"),
    replace(BASE, layout=MeshSizes(dp_shard=8, ep=4), zero_stage=3, cpu_offload=True),
    *(case for case in extreme_cases((4, 8)) if case.first_bias and case.layout.ep == 4),
]  # fmt: skip
QUICK = [next(case for case in LAYOUTS if case.experts_per_token == 1)]


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.thorough) for case in LAYOUTS],
    ids=str,
)
def test_a_layout_with_experts_trains(strict: Ranks, case: Case) -> None:
    row = check(strict, case, STEPS)
    assert row.failures() == [], line(row, STEPS)
