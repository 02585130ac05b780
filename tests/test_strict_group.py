"""Lattice under a process group that orders communication as strictly as NCCL (proofs/strict), and
planted faults that gloo forgives and NCCL does not. With experts, the ranks of an all-to-all send
different numbers of rows."""

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from parallel.axes import MeshSizes
from parallel.pipeline.lower import Exchange, Message, Transfer
from parallel.pipeline.transfer import Transfers
from proofs.parity.cases import Case
from proofs.parity.expert_cases import STEPS, extreme_cases
from proofs.ranks import Ranks
from proofs.strict import group as strict_group
from proofs.strict.referee import Operation, Peer, Referee, Wrong
from tests.parity_tiers import agrees
from tests.runs import LAYOUT_3D, forget_last, losses, metrics_of, run, said_by, write_config

thorough, slow = (
    partial(pytest.param, marks=mark) for mark in (pytest.mark.thorough, pytest.mark.slow)
)


BACKENDS = ["strict", "strict_shared"]


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


def send_rows(rows: list[list[int]], splits: bool = True) -> list[float]:
    """`rows[i][j]` rows of the number i go from rank i to rank j. What this rank receives. Without
    splits, a rank's rows are for all ranks alike."""
    rank, world = dist.get_rank(), dist.get_world_size()
    receive = [rows[other][rank] for other in range(world)]
    x = torch.full((sum(rows[rank]), 2), float(rank))
    out = torch.full((sum(receive), 2), -1.0)
    dist.all_to_all_single(out, x, *([receive, rows[rank]] if splits else []))
    return out[:, 0].tolist()


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


def a_pipeline_of_three() -> float:
    """A stage's first message, as the pipeline sends it; what rank 1 receives."""
    rank, received = dist.get_rank(), 2.0
    group = dist.new_group([0, 1, 2])
    transfers = Transfers(group, (2,), torch.float32, "cpu")
    message = Message(False, 1, 0)
    if rank == 0:
        transfers.give(message, torch.ones(2))
    if rank < 2:
        transfers.exchange(Exchange((Transfer(rank == 0, 1 - rank, message),)))
    if rank == 1:
        received = transfers.take(message).sum().item()
    transfers.finish()
    return received


# --- planted faults ---


def swapped_collectives() -> None:
    """Rank 1 gathers where the others reduce."""
    x = torch.ones(4)
    if dist.get_rank() == 1:
        dist.all_gather_into_tensor(torch.empty(8), x)
    dist.all_reduce(x)


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


def to_both(x: torch.Tensor, *splits: list[int]) -> None:
    dist.all_to_all_single(torch.empty_like(x), x, *splits)


def a_pipeline_that_is_not_made() -> None:
    """Without the all-reduce by which `Transfers` makes the communicator on all ranks."""
    with patch("parallel.pipeline.transfer.dist.all_reduce"):
        a_pipeline_of_three()


DIFFER, ONE_EACH = "different collectives", [[1, 1], [1, 1]]
# name → number of ranks, what the referee says, what they do; gloo checks none of it
FAULTS: dict[str, tuple[int, str, Callable[[], Any]]] = {
    "swapped_collectives": (2, DIFFER, swapped_collectives),
    "other_shapes": (2, DIFFER, lambda: dist.all_reduce(torch.ones(4 - dist.get_rank()))),
    "from_a_thread": (2, "from threads", from_a_thread),
    "a_message_in_another_order": (2, "deadlock", a_message_in_another_order),
    "made_by_few": (3, "deadlock", made_by_few),
    "splits_that_disagree": (
        2, r"rank 0 sends 2 rows over .*, and rank 1 expects 1", splits_that_disagree),
    # each rank has as many rows as it wants, and takes what it sends for what it receives
    "uneven_rows_without_splits": (
        2, r"rank 0 sends 1 rows over .*, and rank 1 expects 2",
        lambda: to_both(torch.ones(2 * (1 + dist.get_rank())))),
    "other_widths": (2, DIFFER, lambda: to_both(torch.ones(2, 4 + dist.get_rank()), *ONE_EACH)),
    "other_dtypes": (
        2, DIFFER,
        lambda: to_both(torch.ones(2, 4).to([torch.float32, torch.int32][dist.get_rank()]),
                        *ONE_EACH)),
    "a_pipeline_that_is_not_made": (3, "deadlock", a_pipeline_that_is_not_made),
}  # fmt: skip
ROWS = {
    "even": [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
    "without splits": [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
    "uneven": [[2, 0, 1], [4, 1, 0], [0, 3, 2]],
    "to_one_rank": [[0, 5, 0], [0, 2, 0], [0, 1, 0]],
    "none": [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
}
TASKS: dict[str, tuple[int, Callable[[], Any]]] = {  # name → number of ranks, and what they do
    **{name: (3, partial(send_rows, ROWS[name], name != "without splits")) for name in ROWS},
    **{name: (world, fault) for name, (world, _, fault) in FAULTS.items()},
    "everything": (4, everything),
    "opposite_orders": (2, opposite_orders),
    "a_pipeline_of_three": (3, a_pipeline_of_three),
}


def until_all_are_through(task: Callable[[], Any]) -> Any:
    result = task()
    dist.barrier()
    return result


def in_turn(backend: str, names: list[str], folder: str) -> dict[str, Any]:
    """What each of TASKS returns on this rank, or the error by which it fails. A fault leaves a
    process group useless, so each task has one of its own, of the first ranks of this start."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), {}
    dist.destroy_process_group()
    for name in names:
        size, task = TASKS[name]
        if rank < size:
            store = dist.FileStore(f"{folder}/{name}", size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
            found[name] = said_by(until_all_are_through, task)
            strict_group.close()
            dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/end", world)  # for the end of this start
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return found


Found = Callable[[str], list[Any]]


@pytest.fixture(scope="module", params=[BACKENDS[0], thorough(BACKENDS[1])])
def found(
    request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Found:
    """Name of a task → what each of its ranks found, all in one start."""
    folder = str(tmp_path_factory.mktemp("stores"))
    all_of = ranks.run(in_turn, 4, request.param, list(TASKS), folder)
    return lambda task: [each[task] for each in all_of if task in each]


def test_it_carries_data(found: Found) -> None:
    expected = [(6.0, [0, 1, 2, 3], (rank - 1) % 4, 1.0) for rank in range(4)]
    assert found("everything") == expected


@pytest.mark.parametrize("rows", ROWS)
def test_it_carries_all_to_alls(found: Found, rows: str) -> None:
    for rank, received in enumerate(found(rows)):
        assert received == [float(i) for i in range(3) for _ in range(ROWS[rows][i][rank])]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(found: Found, fault: str) -> None:
    """On every rank."""
    (world, said, _), told = FAULTS[fault], [str(each) for each in found(fault)]
    assert [re.search(said, each) is not None for each in told] == [True] * world, told


@pytest.mark.parametrize(
    "fault", [from_a_thread, a_message_in_another_order, made_by_few], ids=lambda f: f.__name__
)
def test_gloo_forgives_it(ranks: Ranks, fault: Callable[[], None]) -> None:
    """So the tests over gloo could not find it."""
    ranks.run(fault, 3 if fault is made_by_few else 2)


@pytest.mark.parametrize(("backend", "said"), [("strict_shared", "deadlock"), ("strict", "None")])
def test_opposite_orders(ranks: Ranks, tmp_path: Path, backend: str, said: str) -> None:
    """They are found where the queue is shared; with a queue for each communicator they may be."""
    for each in ranks.run(in_turn, 2, backend, ["opposite_orders"], str(tmp_path)):
        assert said in str(each["opposite_orders"])


def test_the_pipeline_makes_its_communicator(found: Found) -> None:
    """Without that, it would be the last of the faults above."""
    assert found("a_pipeline_of_three") == [2.0] * 3


# --- Lattice itself ---

QUICK = [
    Case(MeshSizes(pp=2, dp_shard=2, tp=2), num_microbatches=2, zero_stage=3),
    Case(MeshSizes(pp=2, cp=2), schedule="zb_h1", num_microbatches=4, document_mask=True),
    # all tokens at one expert
    next(case for case in extreme_cases((4,)) if case.first_bias and case.layout.ep == 4),
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
EXTREMES = [case for case in extreme_cases((4, 8))
            if case.first_bias and case.layout.ep == 4 and case not in QUICK]  # fmt: skip


@pytest.fixture
def strict(request: pytest.FixtureRequest, ranks: Ranks) -> Iterator[Ranks]:
    """The pool, over a strict process group."""
    with patch.multiple(ranks, backend=request.param, timeout=200):
        yield ranks


@pytest.mark.parametrize(
    ("strict", "case", "steps"),
    [
        *(("strict", case, 1) for case in QUICK),
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
    saves, evaluates = {"interval": 3}, {"eval_interval": 3}
    config = write_config(tmp_path, data, parallel=layout, checkpoint=saves, train=evaluates)
    run(strict, 8, config)
    whole = losses(tmp_path)
    forget_last(tmp_path)
    run(strict, 8, config)
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
