"""A step's streams, memory, threads and overlap are checked on the fake GPU, and controls: defects
that are planted must be found."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from costs.as_on_gpu import DEVICE
from model.router import BaseRouter
from parallel import collectives
from parallel.axes import MeshSizes
from parallel.collectives import Pending
from parallel.expert import Exchange
from parallel.mesh import to_device
from parallel.pipeline.schedules import SCHEDULES
from parallel.pipeline.transfer import Transfers
from proofs.parity import __main__ as parity
from proofs.parity.cases import Case
from proofs.parity.run import heads_in_pieces
from runtime.device import DeviceClock, device_thread
from settings.config import Config
from tests import ROOT
from tests.proofs.parity_tiers import dense_covering, expert_covering, thorough_but
from tools.plan.candidates import FIXED
from tools.rehearse.__main__ import main
from tools.rehearse.fake_gpu import fake_gpu, one_rank
from tools.rehearse.findings import RACE, REUSE, SYNC, THREAD
from tools.rehearse.host import checking
from tools.rehearse.races import Races
from tools.rehearse.rank import alone, rehearse
from training.guard import UpdateGuard

LAPTOP = ROOT / "configs/laptop.yaml"


def case_of(layout: MeshSizes, **options: Any) -> Case:
    return Case(layout, **{"dtype": "bfloat16", "kernels": "auto", **options})


TP = MeshSizes(tp=2)
THREE_D = MeshSizes(pp=2, dp_shard=2, tp=2)
HYBRID = MeshSizes(dp_replicate=2, dp_shard=2)

LAYOUTS = {
    "tp": case_of(TP),
    "tp, no sequence parallelism": case_of(TP, sequence_parallel=False),
    "zero 1, hybrid": case_of(HYBRID),
    "zero 2, hybrid": case_of(HYBRID, zero_stage=2),
    "zero 3": case_of(MeshSizes(dp_shard=4), zero_stage=3),
    "zero 3, float32, whole stages": case_of(
        MeshSizes(dp_shard=2), zero_stage=3, fsdp_unit="stage", dtype="float32"
    ),
    "3D, zero 3, full recomputation": case_of(
        THREE_D, zero_stage=3, activation_checkpointing="full"
    ),
    "3D, selective recomputation": case_of(THREE_D, activation_checkpointing="selective"),
    "3D, tied, documents": case_of(THREE_D, tie_embeddings=True, document_mask=True),
    # heads of 8 numbers, which flash attention takes
    # of single sequences, whose keys and values are gathered again
    "cp, no recomputation": case_of(
        MeshSizes(dp_shard=2, cp=2), attention_dim=64, num_microbatches=16
    ),
    "cp and tp, zero 3, selective, documents": case_of(
        MeshSizes(dp_shard=2, cp=2, tp=2),
        attention_dim=64,
        zero_stage=3,
        activation_checkpointing="selective",
        document_mask=True,
    ),
    "cp and pp, zb_h1, full recomputation": case_of(
        MeshSizes(pp=2, dp_replicate=2, cp=2),
        attention_dim=64,
        schedule="zb_h1",
        activation_checkpointing="full",
    ),
    "ep, shared expert": case_of(
        MeshSizes(dp_shard=2, ep=2), router="softmax", num_shared_experts=1, num_microbatches=2
    ),
    # ep across tp and a part of dp_shard
    "ep and tp, zero 3, selective": case_of(
        MeshSizes(dp_shard=4, tp=2, ep=4),
        router="sigmoid_bias",
        router_losses=True,
        num_shared_experts=1,
        zero_stage=3,
        activation_checkpointing="selective",
        num_microbatches=2,
    ),
    "ep and pp, zero 2, zb_h1, full recomputation": case_of(
        MeshSizes(pp=2, dp_shard=2, ep=2),
        router="softmax_renormalised",
        num_dense_layers=1,
        schedule="zb_h1",
        zero_stage=2,
        activation_checkpointing="full",
    ),
    "3D, zero 2, zb_h1, no sequence parallelism": case_of(
        THREE_D, schedule="zb_h1", zero_stage=2, sequence_parallel=False
    ),
} | {
    f"pp and tp, {name}": case_of(
        MeshSizes(pp=2, tp=2),
        schedule=name,
        stages_per_rank=FIXED.get(name, 2),
    )
    for name in SCHEDULES
}

RANKS = [(name, rank) for name, case in LAYOUTS.items() for rank in (0, case.world - 1)]
QUICK = [("zero 3", 0), ("3D, tied, documents", 7), ("pp and tp, zb_h1", 0),
         ("ep, shared expert", 1)]  # fmt: skip
ZERO_3 = replace(
    LAYOUTS["3D, zero 3, full recomputation"], activation_checkpointing="none", num_microbatches=2
)
EXPERTS = LAYOUTS["ep, shared expert"]


# --- the whole step -------------------------------------------------------------------------------


def check(config: Config, world: int, rank: int) -> dict[str, Any]:
    return rehearse(config, world, rank, steps=2, watching=checking)


def check_case(case: Case, rank: int) -> dict[str, Any]:
    with heads_in_pieces():
        return check(case.config(), case.world, rank)


# The largest part of the collectives of an axis, kind and phase that may have no product or
# attention beside them (tools/rehearse/overlap.py). What is not named may all be exposed.
MOST_BARE = {
    "cp all_gather F": 0.6,
    "cp all_gather I": 0.6,
    "cp reduce_scatter B": 0.6,
    "cp reduce_scatter I": 0.6,
    "dp_replicate all_reduce B": 0.6,
    "dp_shard all_gather B": 0.4,
    "dp_shard reduce_scatter B": 0.75,
    "efsdp all_gather F": 0.0,
    "efsdp reduce_scatter B": 0.0,
    "ep all_to_all B": 0.6,
    "tp all_gather B": 0.75,
    "tp all_gather W": 0.3,
    "tp all_reduce B": 0.0,
    "tp reduce_scatter B": 0.6,
}


def exposed(report: dict[str, Any]) -> list[str]:
    """The rows of which more is exposed than may be."""
    return [
        f"{name}: {row['bare']} of {row['count']} have nothing beside them"
        for name, row in report["overlap"].items()
        if row["bare"] > MOST_BARE.get(name, 1.0) * row["count"]
    ]


@pytest.mark.parametrize(("name", "rank"), thorough_but(QUICK, RANKS))
def test_a_layout_has_no_defect_and_keeps_its_overlap(name: str, rank: int) -> None:
    report = alone(check_case, LAYOUTS[name], rank)
    assert report["findings"] == []
    assert report["compared"] > 50  # accesses on two streams to the same memory
    assert exposed(report) == []


def covering() -> Iterator[Any]:
    """The parity proof's cases, in which every pair of option values occurs, on the kernels of a
    GPU, mostly in bfloat16, and on the first or the last rank in turn. All together take seven
    minutes, so that those with every value once are thorough, and the others slow."""
    few = {*dense_covering().few, *expert_covering().few}
    known = set()
    for number, (case, _) in enumerate(parity.plan(parity.WORLDS, quick=True)[0]):
        dtype = "float32" if number % 4 == 0 else "bfloat16"
        on_gpu = replace(case, dtype=dtype, kernels="auto", cpu_offload=False)
        if on_gpu not in known:
            marks = pytest.mark.thorough if case in few else pytest.mark.slow
            yield pytest.param(on_gpu, number % 2 * (case.world - 1), marks=marks)
        known.add(on_gpu)


@pytest.mark.parametrize(("case", "rank"), [*covering()], ids=str)
def test_no_pair_of_options_has_a_defect(case: Case, rank: int) -> None:
    assert alone(check, case.config(), case.world, rank)["findings"] == []


# --- controls: the step with a defect -------------------------------------------------------------


def take_without_waiting(self: Transfers, message: Any) -> Tensor:
    if message in self._here:
        return self._here.pop(message)
    return self._receiving.pop(message)[1]


def guard_that_reads(self: UpdateGuard, loss: Tensor, norm: Tensor) -> Tensor:
    return norm if norm.item() > 0 else norm.abs()


def router_that_reads(self: BaseRouter, logits: Tensor) -> Tensor:
    return logits if logits[0, 0].tolist() > 0 else logits.relu()


def plain_thread(target: Callable[..., None], name: str, *args: Any) -> threading.Thread:
    return threading.Thread(target=target, name=name, args=args, daemon=True)


def nothing(*_: Any) -> None: ...


@pytest.mark.parametrize(
    ("case", "kind", "said", "defect"),
    [
        (ZERO_3, RACE, "over tp", patch.object(Pending, "wait", lambda pending: pending._tensor)),
        (ZERO_3, RACE, "receive over pp", patch.object(Transfers, "take", take_without_waiting)),
        (ZERO_3, RACE, "square_sum", patch.object(FSDPParamGroup, "finalize_backward", nothing)),
        (ZERO_3, REUSE, "all_gather over dp_shard",
         patch.object(FSDPParamGroup, "_wait_all_gather_streams_on_event", nothing)),
        (ZERO_3, SYNC, "tests/rehearse/test_streams.py",
         patch.object(UpdateGuard, "__call__", guard_that_reads)),
        (ZERO_3, SYNC, "without non_blocking",
         patch("tools.rehearse.fake_gpu.to_device", lambda tensor, _: tensor.to(DEVICE))),
        (ZERO_3, THREAD, "the thread save",
         patch("runtime.checkpoint.save.device_thread", plain_thread)),
        (ZERO_3, RACE, "the thread save",
         patch.object(DeviceClock, "stop", lambda _: lambda: 0.0)),
        (EXPERTS, RACE, "all_to_all over ep",
         patch.object(Exchange, "_wait", lambda rows: tuple(p._tensor for p in rows.pending))),
        (EXPERTS, SYNC, "tests/rehearse/test_streams.py",
         patch.object(BaseRouter, "preferences", router_that_reads)),
    ],
    ids=["wait of tp", "wait for a message", "end of FSDP's backward", "freed gather", "item",
         "copy to the device", "thread of a save", "wait of a save", "wait of rows",
         "second wait of the host"],
)  # fmt: skip
def test_a_defect_in_a_step_is_found(case: Case, kind: str, said: str, defect: Any) -> None:
    with defect:
        findings = alone(check, case.config(), case.world, 0)["findings"]
    assert {finding.split(":")[0] for finding in findings} == {kind}
    assert any(said in finding for finding in findings)


def test_a_collective_that_became_synchronous_is_found() -> None:
    start = collectives._reduce_scatter_single

    def start_and_wait(*args: Any, **options: Any) -> Any:
        work = start(*args, **options)
        work.wait()
        return work

    with patch.object(collectives, "_reduce_scatter_single", start_and_wait):
        report = alone(check_case, LAYOUTS["tp"], 0)
    assert exposed(report) == ["tp reduce_scatter B: 16 of 16 have nothing beside them"]


# --- small programs -------------------------------------------------------------------------------


@contextmanager
def checked_device() -> Iterator[Races]:
    with (
        one_rank(MeshSizes(), 0, DEVICE) as mesh,
        fake_gpu() as device,
        checking(mesh, device) as races,
    ):
        device.here.in_step = True
        yield races


def kinds(races: Races) -> dict[str, Any]:
    return {"found": [kind for kind, _ in races.findings]}


def uses_a_side_stream(waits: bool, part: int) -> dict[str, Any]:
    """The compute stream writes the first half of a tensor, another stream reads half `part`."""
    with checked_device() as races:
        side = torch.cuda.Stream()
        x = torch.zeros(8, device=DEVICE)
        side.wait_stream(torch.cuda.current_stream())
        x[:4].fill_(1.0)
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.neg(x[4 * part : 4 * part + 4])
        return kinds(races)


@pytest.mark.parametrize(
    ("waits", "part", "found"), [(True, 0, []), (False, 0, [RACE]), (False, 1, [])]
)
def test_streams_must_wait_for_each_other(waits: bool, part: int, found: list[str]) -> None:
    assert alone(uses_a_side_stream, waits, part) == {"found": found}


def frees_early(then: str) -> dict[str, Any]:
    """Another stream reads a tensor of the compute stream, which frees it and allocates another."""
    with checked_device() as races:
        compute, side = torch.cuda.current_stream(), torch.cuda.Stream()
        x = torch.zeros(8, device=DEVICE)
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            torch.neg(x)
        if then == "record_stream":
            x.record_stream(side)
        del x
        if then == "wait":
            compute.wait_stream(side)
        torch.zeros(8, device=DEVICE)
        return kinds(races)


@pytest.mark.parametrize(
    ("then", "found"), [("nothing", [REUSE]), ("record_stream", []), ("wait", [])]
)
def test_memory_must_not_be_reused_while_a_stream_reads_it(then: str, found: list[str]) -> None:
    assert alone(frees_early, then) == {"found": found}


def read_back(x: Tensor, waits: bool) -> None:
    pinned = torch.empty(8, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    if waits:
        copied.synchronize()
    pinned.sum()


READS: dict[str, tuple[list[str], Callable[[Tensor], Any]]] = {  # what is found, of x on the device
    "to the device": ([], lambda _: to_device(torch.ones(8), "cuda")),
    "unpinned": ([SYNC], lambda _: torch.ones(8).to(DEVICE, non_blocking=True)),
    "tolist": ([SYNC], Tensor.tolist),
    "nonzero": ([SYNC], Tensor.nonzero),
    "equal": ([SYNC], lambda x: torch.equal(x, x)),
    "host index": ([SYNC], lambda x: x[torch.tensor([0])]),
    "tensor": ([SYNC], lambda _: torch.tensor([1.0], device=DEVICE)),
    "read after waiting": ([], partial(read_back, waits=True)),
    "read at once": ([RACE], partial(read_back, waits=False)),
}


def reads(what: str) -> dict[str, Any]:
    with checked_device() as races:
        x = torch.zeros(8, device=DEVICE)
        races.gpu.here.in_step = "read" not in what  # between steps, waiting is allowed
        READS[what][1](x)
        return kinds(races)


@pytest.mark.parametrize("what", READS)
def test_the_host_waits_for_what_it_reads(what: str) -> None:
    assert alone(reads, what) == {"found": READS[what][0]}


def works_in_a_thread(make: Callable[..., threading.Thread]) -> dict[str, Any]:
    with checked_device() as races:
        thread = make(partial(torch.zeros, 8, device=DEVICE), "worker")
        thread.start()
        thread.join()
        return kinds(races)


@pytest.mark.parametrize(("make", "found"), [(device_thread, []), (plain_thread, [THREAD])])
def test_a_thread_must_choose_its_device(make: Any, found: list[str]) -> None:
    assert alone(works_in_a_thread, make) == {"found": found}


# --- the command ----------------------------------------------------------------------------------


def test_the_command_fails_if_it_finds_a_defect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control: a guard that reads from the device. (Without one, docs/proofs.md shows it.)"""
    file = tmp_path / "report.json"
    with patch.object(UpdateGuard, "__call__", guard_that_reads):
        assert main([str(LAPTOP), "--races", "--json", str(file)]) == 1
    (finding,) = json.loads(file.read_text(encoding="utf-8"))["findings"]
    assert finding.startswith(f"{SYNC}: aten._local_scalar_dense.default needs a value")
    said = capsys.readouterr().out
    assert f"\n  {finding}\n" in said
    assert "\ntp reduce_scatter B " in said
