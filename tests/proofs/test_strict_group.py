"""Lattice under a process group that orders communication as strictly as NCCL (proofs/strict), and
planted faults that gloo forgives and NCCL does not. With experts, the ranks of an all-to-all send
different numbers of rows."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from parallel.axes import MeshSizes
from parallel.pipeline.lower import Exchange, Message, Transfer
from parallel.pipeline.transfer import Transfers
from proofs.parity.cases import Case
from proofs.parity.expert_cases import STEPS, extreme_cases
from proofs.ranks import RankError, Ranks
from proofs.strict.referee import Operation, Peer, Referee, Wrong
from tests.proofs.parity_tiers import agrees
from tests.runs import LAYOUT_3D, forget_last, losses, metrics_of, train_run, write_config

thorough, slow = (
    partial(pytest.param, marks=mark) for mark in (pytest.mark.thorough, pytest.mark.slow)
)


BACKENDS = ["strict", "strict_shared"]


@pytest.fixture(scope="module", params=[BACKENDS[0], thorough(BACKENDS[1])])
def strict(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(8, timeout=200, backend=request.param) as pool:
        yield pool


def everything() -> tuple[float, list[int], float, float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), float(rank))
    dist.all_reduce(x)
    ranks: list[int] = [0] * world
    dist.all_gather_object(ranks, rank)
    received = torch.empty(4)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((4,), float(rank)), (rank + 1) % world),
            dist.P2POp(dist.irecv, received, (rank - 1) % world),
        ]
    )
    for work in works:
        work.wait()
    alone = torch.empty(4)
    if rank == 0:
        dist.send(torch.ones(4), 1)
    elif rank == 1:
        dist.recv(alone, 0)
    return x[0].item(), ranks, received[0].item(), alone[0].item() if rank == 1 else 1.0


def test_it_carries_data(strict: Ranks) -> None:
    for rank, answer in enumerate(strict.run(everything, 4)):
        assert answer == (6.0, [0, 1, 2, 3], (rank - 1) % 4, 1.0)


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


# --- planted faults ---


def swapped_collectives() -> None:
    """Rank 1 gathers where the others reduce."""
    x = torch.ones(4)
    if dist.get_rank() == 1:
        dist.all_gather_into_tensor(torch.empty(8), x)
    dist.all_reduce(x)


def other_shapes() -> None:
    """gloo checks nothing: rank 1 reduces fewer numbers."""
    dist.all_reduce(torch.ones(4 - dist.get_rank()))


def from_a_thread() -> None:
    """A thread agrees over the group that training uses: who comes first is chance."""
    dist.all_reduce(torch.ones(1))
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
    thread.start()
    dist.all_reduce(torch.ones(1))
    thread.join()


def a_message_in_another_order() -> None:
    """Rank 0 sends before the all-reduce, rank 1 receives after it."""
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(1))
    call = dist.P2POp(dist.isend if rank == 0 else dist.irecv, torch.ones(4), 1 - rank)
    works = dist.batch_isend_irecv([call]) if rank == 0 else []
    dist.all_reduce(torch.ones(1))
    for work in works or dist.batch_isend_irecv([call]):
        work.wait()


def made_by_few() -> None:
    """The first operation of a communicator is a message between two of its three ranks."""
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(1))
    group = dist.new_group([0, 1, 2])
    if rank < 2:
        call = dist.isend if rank == 0 else dist.irecv
        works = dist.batch_isend_irecv([dist.P2POp(call, torch.ones(4), 1 - rank, group=group)])
        for work in works:
            work.wait()
    dist.all_reduce(torch.ones(1))


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


FAULTS = [
    (swapped_collectives, 2, "different collectives"),
    (other_shapes, 2, "different collectives"),
    (from_a_thread, 2, "from threads"),
    (a_message_in_another_order, 2, "deadlock"),
    (made_by_few, 3, "deadlock"),
    (splits_that_disagree, 2, r"rank 0 sends 2 rows over .*, and rank 1 expects 1"),
    thorough(uneven_rows_without_splits, 2, r"rank 0 sends 1 rows over .*, and rank 1 expects 2"),
    thorough(other_widths, 2, "different collectives"),
    (other_dtypes, 2, "different collectives"),
]


@pytest.mark.parametrize(("fault", "world", "said"), FAULTS)
def test_a_planted_fault_is_found(
    strict: Ranks, fault: Callable[[], None], world: int, said: str
) -> None:
    with pytest.raises(RankError, match=said):
        strict.run(fault, world)


@pytest.mark.parametrize(
    "fault", [from_a_thread, a_message_in_another_order, made_by_few], ids=lambda f: f.__name__
)
def test_gloo_forgives_it(ranks: Ranks, fault: Callable[[], None]) -> None:
    """So the tests over gloo could not find it."""
    ranks.run(fault, 3 if fault is made_by_few else 2)


def opposite_orders() -> None:
    """Two communicators of the same ranks, used in opposite orders, nothing waited for between."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    tensors = [torch.ones(4), torch.ones(4)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    order = (0, 1) if dist.get_rank() == 0 else (1, 0)
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()


def test_opposite_orders_are_found_where_the_queue_is_shared() -> None:
    with (
        Ranks(2, timeout=200, backend="strict_shared") as shared,
        pytest.raises(RankError, match="deadlock"),
    ):
        shared.run(opposite_orders, 2)


def test_opposite_orders_are_allowed_with_a_queue_for_each_communicator() -> None:
    with Ranks(2, timeout=200, backend="strict") as strict:
        strict.run(opposite_orders, 2)


def a_pipeline_of_three() -> None:
    """A stage's first message, as the pipeline sends it."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1, 2])
    transfers = Transfers(group, (2,), torch.float32, "cpu")
    message = Message(False, 1, 0)
    if rank == 0:
        transfers.give(message, torch.ones(2))
    if rank < 2:
        transfers.exchange(Exchange((Transfer(rank == 0, 1 - rank, message),)))
    if rank == 1:
        assert transfers.take(message).sum() == 2
    transfers.finish()


def a_pipeline_that_is_not_made(function: Callable[[], None] = a_pipeline_of_three) -> None:
    """The same without the all-reduce by which `Transfers` makes the communicator on all ranks."""
    with patch("parallel.pipeline.transfer.dist.all_reduce"):
        function()


def test_the_pipeline_makes_its_communicator(strict: Ranks) -> None:
    strict.run(a_pipeline_of_three, 3)
    with pytest.raises(RankError, match="deadlock"):
        strict.run(a_pipeline_that_is_not_made, 3)


# --- Lattice itself ---

QUICK = [
    Case(MeshSizes(pp=2, dp_shard=2, tp=2), num_microbatches=2, zero_stage=3),
    Case(MeshSizes(pp=2, cp=2), schedule="zb_h1", num_microbatches=4, document_mask=True),
    # all tokens at one expert
    next(case for case in extreme_cases() if case.layout.ep == case.world == 4),
]
LAYOUTS = [
    Case(MeshSizes(pp=2, cp=2, tp=2), schedule="zb_h1", num_microbatches=4, document_mask=True),
    Case(MeshSizes(dp_shard=2, cp=4), zero_stage=3, activation_checkpointing="selective",
         num_microbatches=2),
    Case(MeshSizes(dp_replicate=2, cp=2, tp=2), zero_stage=0, activation_checkpointing="full",
         num_microbatches=2),
    # single sequences: backward gathers keys and values again, among weights and messages
    Case(MeshSizes(pp=2, dp_shard=2, cp=2), schedule="zb_h1", zero_stage=3, num_microbatches=16),
    Case(MeshSizes(dp_shard=2, cp=2, tp=2), tp_pieces=2, num_kv_heads=8, document_mask=True,
         num_microbatches=16),
    Case(MeshSizes(pp=4, tp=2), schedule="zb_v", stages_per_rank=2, num_microbatches=8),
    Case(MeshSizes(pp=4, dp_replicate=2), schedule="interleaved_1f1b", stages_per_rank=2,
         num_microbatches=8, tie_embeddings=True, zero_stage=2),
    Case(MeshSizes(dp_replicate=2, dp_shard=2, tp=2), sequence_parallel=False,
         activation_checkpointing="full", num_microbatches=2),
    Case(MeshSizes(pp=2, tp=4), schedule="zb_h1", tp_pieces=4,
         activation_checkpointing="selective", num_microbatches=4),
]  # fmt: skip
BASE = Case(MeshSizes(), router="sigmoid_bias", router_losses=True, num_shared_experts=1)
EXPERTS = [
    replace(BASE, layout=MeshSizes(pp=2, dp_shard=2, tp=2, ep=4), schedule="zb_h1", zero_stage=3),
    replace(BASE, layout=MeshSizes(pp=2, cp=2, ep=2), schedule="zb_v", stages_per_rank=2,
            activation_checkpointing="selective"),
    replace(BASE, layout=MeshSizes(dp_replicate=2, tp=2, ep=2), zero_stage=2,
            activation_checkpointing="full", document_mask=True),
    replace(BASE, layout=MeshSizes(pp=2, dp_shard=4, ep=2), schedule="interleaved_1f1b",
            stages_per_rank=2, zero_stage=2, num_dense_layers=1),
    replace(BASE, layout=MeshSizes(cp=2, tp=2, ep=4), tp_pieces=2, router="softmax"),
    replace(BASE, layout=MeshSizes(dp_shard=8, ep=4), zero_stage=3, cpu_offload=True),
]  # fmt: skip
EXTREMES = [case for case in extreme_cases()
            if case.first_bias and case.layout.ep == 4 and case not in QUICK]  # fmt: skip


@pytest.mark.parametrize(
    ("strict", "case", "steps"),
    [
        *(("strict", case, 1) for case in (QUICK[0], QUICK[2])),
        thorough("strict", QUICK[1], 1),
        *(thorough("strict", case, 2) for case in LAYOUTS),
        *(thorough("strict", case, STEPS) for case in EXPERTS),
        *(thorough("strict_shared", case, 1) for case in QUICK),
        # seven minutes
        *(slow("strict_shared", case, 2) for case in LAYOUTS),
        *(slow("strict_shared", case, STEPS) for case in EXPERTS),
        *(slow(strict, case, STEPS) for strict in BACKENDS for case in EXTREMES),
    ],
    indirect=["strict"],
    ids=str,
)
def test_a_layout_trains(strict: Ranks, case: Case, steps: int) -> None:
    """`python -m proofs.parity --strict` runs all."""
    agrees(strict, case, steps)


@pytest.mark.parametrize(
    ("strict", "layout"),
    [
        thorough("strict", LAYOUT_3D),
        slow("strict_shared", LAYOUT_3D),  # a minute
        *(slow(strict, {"cp": 2, "tp": 2}) for strict in BACKENDS),
    ],
    indirect=["strict"],
    ids=str,
)
def test_a_run_saves_evaluates_and_resumes(
    strict: Ranks, data: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    """Saving, agreements on stops, guards and evaluation beside training; a run that is resumed has
    the numbers of the whole one."""
    config = write_config(
        tmp_path,
        data,
        parallel=layout,
        checkpoint={"interval": 3},
        train={"eval_interval": 3},
    )
    assert strict.run(train_run, 8, [config]) == [""] * 8
    whole = losses(tmp_path)
    forget_last(tmp_path)
    assert strict.run(train_run, 8, [config]) == [""] * 8
    assert losses(tmp_path) == whole
    assert "eval_loss" in metrics_of(tmp_path)[2]


# --- the referee ---


def test_the_referee_releases_a_collective_when_all_have_begun() -> None:
    referee = Referee(2)
    operation = Operation("allreduce")
    assert referee.begins(0, "q", "group", [0, 1], operation) == []
    assert sorted(referee.begins(1, "q", "group", [0, 1], operation)) == [(0, "q"), (1, "q")]


def test_the_referee_matches_messages_by_order() -> None:
    """A message of another size than the receiver expects: NCCL would write beyond its end."""
    referee = Referee(2)
    send, receive = Peer(True, 1, "[4]"), Peer(False, 0, "[2]")
    referee.begins(0, "q", "group", [0, 1], Operation(peers=(send,)))
    with pytest.raises(Wrong, match="receives"):
        referee.begins(1, "q", "group", [0, 1], Operation(peers=(receive,)))


def test_a_batch_runs_when_all_of_it_has_partners() -> None:
    referee, members = Referee(3), [0, 1, 2]
    assert referee.begins(0, "q", "g", members, Operation(peers=(Peer(True, 1, ""),))) == []
    both = Operation(peers=(Peer(False, 0, ""), Peer(True, 2, "")))
    assert referee.begins(1, "q", "g", members, both) == [(0, "q")]
    last = Operation(peers=(Peer(False, 1, ""),))
    assert sorted(referee.begins(2, "q", "g", members, last)) == [(1, "q"), (2, "q")]


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
