"""Lattice under a process group that orders communication as strictly as NCCL (proofs/strict), and
planted faults that gloo forgives and NCCL does not. With experts, the ranks of an all-to-all send
different numbers of rows."""

import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from parallel.pipeline.actions import Message
from parallel.pipeline.lower import Exchange, Transfer
from parallel.pipeline.transfer import Transfers
from proofs.ranks import RankError, Ranks
from tests.proofs.parity_tiers import strictly, thorough_but
from tests.runs import LAYOUT_3D, evaluations, forget_last, losses, run, write_config

BACKENDS = ["strict", "strict_shared"]


@pytest.fixture(params=thorough_but(BACKENDS[:1], BACKENDS))
def strict(request: pytest.FixtureRequest, ranks: Ranks) -> Iterator[Ranks]:
    with strictly(ranks, request.param):
        yield ranks


def objects_and_messages() -> tuple[list[int], float, list[float]]:
    """What no parity case sends (test_parity.py): objects, a message outside of a batch, and an
    all-to-all of equal parts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks: list[int] = [0] * world
    dist.all_gather_object(ranks, rank)
    alone = torch.full((4,), float(rank != 1))
    if rank < 2:
        dist.recv(alone, 0) if rank else dist.send(alone, 1)
    out = torch.empty(world)
    dist.all_to_all_single(out, torch.full((world,), float(rank)))
    return ranks, alone[0].item(), out.tolist()


def test_it_carries_data(strict: Ranks) -> None:
    assert strict.run(objects_and_messages, 3) == [([0, 1, 2], 1.0, [0.0, 1.0, 2.0])] * 3


# --- planted faults ---


def from_a_thread(rank: int) -> None:
    """A thread agrees over the group that training uses: who comes first is chance."""
    dist.all_reduce(torch.ones(1))
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
    thread.start()
    dist.all_reduce(torch.ones(1))
    thread.join()


ONES = torch.ones(4)  # gloo reads it until it is sent


def a_message(rank: int, group: dist.ProcessGroup | None = None, size: int = 4) -> dist.Work:
    """Rank 0 sends, rank 1 receives."""
    call = dist.isend if rank == 0 else dist.irecv
    return dist.batch_isend_irecv([dist.P2POp(call, ONES[:size], 1 - rank, group=group)])[0]


def a_message_in_another_order(rank: int) -> None:
    """Rank 0 sends before the all-reduce, rank 1 receives after it."""
    dist.all_reduce(torch.ones(1))
    work = a_message(rank) if rank == 0 else None
    dist.all_reduce(torch.ones(1))
    (work or a_message(rank)).wait()


def made_by_few(rank: int) -> None:
    """The first operation of a communicator is a message between two of its three ranks."""
    dist.all_reduce(torch.ones(1))
    group = dist.new_group([0, 1, 2])
    if rank < 2:
        a_message(rank, group).wait()
    dist.all_reduce(torch.ones(1))


def both_send_first(rank: int) -> None:
    """Two ranks send to each other and receive from each other, not in one batch."""
    tensors = [torch.ones(4), torch.ones(4)]
    for work in [
        dist.batch_isend_irecv([dist.P2POp(call, tensor, 1 - rank)])[0]
        for call, tensor in zip((dist.isend, dist.irecv), tensors, strict=True)
    ]:
        work.wait()


def opposite_orders(rank: int) -> None:
    """Two communicators of the same ranks, used in opposite orders, nothing waited for between."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    order = groups if rank == 0 else groups[::-1]
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in order]
    for work in works:
        work.wait()


def all_to_all(
    x: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None = None
) -> None:
    dist.all_to_all_single(x.new_empty(sum(received), *x.shape[1:]), x, received, sent, group)


def uneven_in_a_group(rank: int) -> None:
    """A communicator's rank 0 is rank 1 of the world."""
    group = dist.new_group([1, 2])
    if rank:
        all_to_all(torch.ones(4 - rank, 4), [1, 3 - rank], [1, 1], group)


DIFFERENT = "different collectives"
# ranks, what is said, what a rank does
FAULTS: dict[str, tuple[int, str, Callable[[int], Any]]] = {
    "rank 1 gathers where the other reduces": (2, DIFFERENT, lambda rank: (
        dist.all_gather_into_tensor(torch.empty(8), torch.ones(4)) if rank
        else dist.all_reduce(torch.ones(4)))),
    # gloo checks nothing
    "rank 1 reduces fewer numbers": (2, DIFFERENT, lambda rank: dist.all_reduce(
        torch.ones(4 - rank))),
    "rank 1 receives fewer numbers than rank 0 sends":  # NCCL would write beyond their end
        (2, "receives", lambda rank: a_message(rank, size=4 - rank).wait()),
    "from a thread": (2, "from threads", from_a_thread),
    "a message in another order": (2, "deadlock", a_message_in_another_order),
    "made by few": (3, "deadlock", made_by_few),
    "both send first": (2, "deadlock", both_send_first),
    "rank 1 sends two rows to rank 2, which expects one":
        (3, r"rank 1 sends 2 rows over .*, and rank 2 expects 1", uneven_in_a_group),
    "opposite orders": (2, "deadlock", opposite_orders),
    # Each rank has as many rows as it wants, and takes what it sends for what it receives.
    "uneven rows without splits": (2, r"rank 0 sends 1 rows over .*, and rank 1 expects 2",
         lambda rank: dist.all_to_all_single(torch.ones(2 + 2 * rank), torch.ones(2 + 2 * rank))),
    "other widths":
        (2, DIFFERENT, lambda rank: all_to_all(torch.ones(2, 4 + rank), [1, 1], [1, 1])),
    "other dtypes": (2, DIFFERENT, lambda rank: all_to_all(
        torch.ones(2, 4, dtype=(torch.float32, torch.int32)[rank]), [1, 1], [1, 1])),
}  # fmt: skip


FORGIVEN = ["from a thread", "a message in another order", "made by few", "both send first"]
RARE = ["uneven rows without splits", "other widths", "other dtypes"]


def do(name: str) -> None:
    FAULTS[name][2](dist.get_rank())


PLANTED = [("strict_shared" if fault == "opposite orders" else "strict", fault) for fault in FAULTS]
QUICK = [(backend, fault) for backend, fault in PLANTED if fault not in RARE]


@pytest.mark.parametrize(
    ("strict", "fault"),
    thorough_but(QUICK, dict.fromkeys([*PLANTED, *(("strict_shared", each) for _, each in QUICK)])),
    indirect=["strict"],
)
def test_a_planted_fault_is_found(strict: Ranks, fault: str) -> None:
    world, said, _ = FAULTS[fault]
    with pytest.raises(RankError, match=said):
        strict.run(do, world, fault)


def test_gloo_forgives_them(ranks: Ranks) -> None:
    """So the tests over gloo could not find them. And opposite orders are allowed where each
    communicator has a queue."""
    for fault in FORGIVEN:
        ranks.run(do, FAULTS[fault][0], fault)
    with strictly(ranks):
        ranks.run(do, 2, "opposite orders")


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


# --- Lattice itself (and test_parity.py) ---


RUNS = list(product(BACKENDS, (LAYOUT_3D, {"cp": 2, "tp": 2})))


@pytest.mark.parametrize(
    ("strict", "layout"), thorough_but([], RUNS, RUNS[1:]), indirect=["strict"], ids=str
)
def test_a_run_saves_evaluates_and_resumes(
    strict: Ranks, data: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    """Saving, agreements on stops, guards and evaluation beside training; a run that is resumed has
    the numbers of the whole one."""
    sections = {"train": {"steps": 4, "eval_interval": 2}, "checkpoint": {"interval": 2}}
    config = write_config(tmp_path, data, parallel=layout, model={"num_layers": 2}, **sections)
    run(strict, 8, config)
    whole = losses(tmp_path), evaluations(tmp_path)
    forget_last(tmp_path)
    run(strict, 8, config)
    assert (losses(tmp_path), evaluations(tmp_path)) == whole
    assert whole[1].keys() == {2, 4}
