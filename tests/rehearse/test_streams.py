"""A step's streams, memory, threads and overlap are checked on the fake GPU, and controls: defects
that are planted must be found."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from costs.as_on_gpu import DEVICE
from model.router import BaseRouter
from parallel import collectives
from parallel.axes import MeshSizes
from parallel.collectives import Pending
from parallel.data import FSDPSwitches
from parallel.dispatch.all_to_all import Rows
from parallel.pipeline.schedules import SCHEDULES, STAGES_PER_RANK
from parallel.pipeline.transfer import Transfers
from proofs.parity import __main__ as parity
from proofs.parity.cases import Case
from proofs.parity.run import as_in_long_sequences
from settings.config import Config
from tests.planted import planted
from tests.proofs.parity_tiers import dense_covering, expert_covering, thorough_but
from tools.rehearse.__main__ import main
from tools.rehearse.findings import RACE, REUSE, SYNC, THREAD
from tools.rehearse.races import checking
from tools.rehearse.rank import alone, rehearse
from training.guard import UpdateGuard


def case_of(layout: MeshSizes, **options: Any) -> Case:
    return Case(layout, **{"dtype": "bfloat16", "kernels": "auto", **options})


TP = MeshSizes(tp=2)
THREE_D = MeshSizes(pp=2, dp_shard=2, tp=2)

# Those whose overlap or collectives differ. `covering` has every value of every option.
LAYOUTS = {
    "tp": case_of(TP),
    "tp, no sequence parallelism": case_of(TP, sequence_parallel=False),
    "zero 2, hybrid": case_of(MeshSizes(dp_replicate=2, dp_shard=2), zero_stage=2),
    "zero 3": case_of(MeshSizes(dp_shard=4), zero_stage=3),
    "3D, tied, documents": case_of(THREE_D, tie_embeddings=True, document_mask=True),
    "3D, zero 2, zb_h1, no sequence parallelism": case_of(
        THREE_D, schedule="zb_h1", zero_stage=2, sequence_parallel=False),
    # heads of 8 numbers, which flash attention takes
    # of single sequences, whose keys and values are gathered again
    "cp, no recomputation": case_of(
        MeshSizes(dp_shard=2, cp=2), attention_dim=64, num_microbatches=16),
    "cp and pp, zb_h1, full recomputation": case_of(
        MeshSizes(pp=2, dp_replicate=2, cp=2), attention_dim=64, schedule="zb_h1",
        activation_checkpointing="full"),
    "ep, shared expert": case_of(
        MeshSizes(dp_shard=2, ep=2), router="softmax", num_shared_experts=1, num_microbatches=2),
    # ep across tp and a part of dp_shard
    "ep and tp, zero 3, selective": case_of(
        MeshSizes(dp_shard=4, tp=2, ep=4), router="sigmoid_bias", router_losses=True,
        num_shared_experts=1, zero_stage=3, activation_checkpointing="selective",
        num_microbatches=2),
    **{f"pp and tp, {name}": case_of(
        MeshSizes(pp=2, tp=2), schedule=name, stages_per_rank=STAGES_PER_RANK.get(name, 2))
       for name in SCHEDULES},
}  # fmt: skip

# Without a pipeline all ranks run the same code, but for the last one of cp, which has one chunk.
RANKS = [
    (name, rank)
    for name, case in LAYOUTS.items()
    for rank in (0, case.world - 1)
    if rank > 0 or case.layout.pp > 1 or case.layout.cp > 1
]
QUICK = [("3D, tied, documents", 7), ("pp and tp, zb_h1", 0), ("ep, shared expert", 1)]
ZERO_3 = case_of(THREE_D, zero_stage=3, num_microbatches=2)
EXPERTS = LAYOUTS["ep, shared expert"]


# --- the whole step -------------------------------------------------------------------------------


def check(config: Config, world: int, rank: int) -> dict[str, Any]:
    return rehearse(config, world, rank, steps=2, watching=checking)


def check_case(case: Case, rank: int) -> dict[str, Any]:
    with as_in_long_sequences():
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
        on_gpu = replace(case, dtype=dtype, kernels="auto", offload="none")
        if on_gpu not in known:
            marks = pytest.mark.thorough if case in few else pytest.mark.slow
            yield pytest.param(on_gpu, number % 2 * (case.world - 1), marks=marks)
        known.add(on_gpu)


@pytest.mark.parametrize(("case", "rank"), [*covering()], ids=str)
def test_no_pair_of_options_has_a_defect(case: Case, rank: int) -> None:
    assert alone(check, case.config(), case.world, rank)["findings"] == []


@pytest.mark.parametrize("waits_at_once", [False, True], ids=["", "control"])
def test_a_stages_last_reductions_run_beside_the_next_stages_backward(waits_at_once: bool) -> None:
    """All but that of the rank's last stage. Control: a stage that waits for its own at once."""
    case = Case(
        MeshSizes(pp=2, dp_shard=2), schedule="interleaved_1f1b", stages_per_rank=2,
        dtype="bfloat16", kernels="auto",
    )  # fmt: skip

    @planted(FSDPSwitches, "after_backward")
    def at_once(honest: Any, self: FSDPSwitches, module: Any, last: bool) -> None:
        honest(self, module, last)
        if last:
            self._wait()

    with at_once() if waits_at_once else nullcontext():
        row = alone(check_case, case, 3)["overlap"]["dp_shard reduce_scatter B"]
    assert (row["bare"], row["count"]) == (2 if waits_at_once else 1, 4)


# --- controls: the step with a defect -------------------------------------------------------------


def take_without_waiting(self: Transfers, message: Any) -> Tensor:
    if message in self._here:
        return self._here.pop(message)
    return self._receiving.pop(message)[1]


def rows_without_waiting(self: Rows) -> list[Tensor]:
    pending, self._pending = self._pending, []
    return [each._tensor for each in pending]


def guard_that_reads(self: UpdateGuard, loss: Tensor, norm: Tensor) -> Tensor:
    return norm if norm.item() > 0 else norm.abs()


def guard_that_counts(self: UpdateGuard, loss: Tensor, norm: Tensor) -> Tensor:
    return norm + norm.reshape(1)[norm.reshape(1) > 0].sum()


def router_that_reads(self: BaseRouter, logits: Tensor) -> Tensor:
    return logits if logits[0, 0].tolist() > 0 else logits.relu()


def plain_thread(target: Callable[..., None], name: str, *args: Any) -> threading.Thread:
    return threading.Thread(target=target, name=name, args=args, daemon=True)


def nothing(*_: Any) -> None: ...


TO_DEVICE, HERE = "tools.rehearse.fake_gpu.to_device", "tests/rehearse/test_streams.py"
# name → the defect, the kind of the finding, and what it says
DEFECTS = {
    "wait of tp": (patch.object(Pending, "wait", lambda pending: pending._tensor), RACE, "over tp"),
    "copy to the device":
        (patch(TO_DEVICE, lambda tensor, _: tensor.to(DEVICE)), SYNC, "without non_blocking"),
    "thread of a save":
        (patch("runtime.checkpoint.save.device_thread", plain_thread), THREAD, "the thread save"),
    "wait for a message":
        (patch.object(Transfers, "take", take_without_waiting), RACE, "receive over pp"),
    "freed gather":
        (patch.object(FSDPParamGroup, "_wait_all_gather_streams_on_event", nothing), REUSE,
         "all_gather over dp_shard"),
    "mask that is counted": (patch.object(UpdateGuard, "__call__", guard_that_counts), SYNC, HERE),
    "end of FSDP's backward":
        (patch.object(FSDPParamGroup, "finalize_backward", nothing), RACE, "square_sum"),
    "item": (patch.object(UpdateGuard, "__call__", guard_that_reads), SYNC, HERE),
    "wait of a save":
        (patch("runtime.checkpoint.save.seconds_between", lambda *_: 0.0), RACE, "the thread save"),
    "copy that is not pinned":
        (patch(TO_DEVICE, lambda tensor, _: tensor.to(DEVICE, non_blocking=True)), SYNC,
         "with memory that is not pinned"),
    "wait of rows": (patch.object(Rows, "_wait", rows_without_waiting), RACE, "all_to_all over ep"),
    "second wait of the host":
        (patch.object(BaseRouter, "preferences", router_that_reads), SYNC, HERE),
}  # fmt: skip
TOGETHER = {
    "wait of tp, copy to the device, thread of a save": ZERO_3,
    "wait for a message, freed gather, mask that is counted": ZERO_3,
    "end of FSDP's backward, item": ZERO_3,
    "wait of a save, copy that is not pinned": ZERO_3,
    "wait of rows, second wait of the host": EXPERTS,
}


@pytest.mark.parametrize("names", TOGETHER)
def test_a_defect_in_a_step_is_found(names: str) -> None:
    """Defects of different kinds share a step. Each is found, and nothing of another kind."""
    case, defects = TOGETHER[names], [DEFECTS[name] for name in names.split(", ")]
    with ExitStack() as planted:
        for defect, *_ in defects:
            planted.enter_context(defect)
        findings = alone(check, case.config(), case.world, 0)["findings"]
    assert {finding.split(":")[0] for finding in findings} == {kind for _, kind, _ in defects}
    for _, kind, said in defects:
        assert any(each.startswith(kind) and said in each for each in findings), said


def test_a_collective_that_became_synchronous_is_found() -> None:
    start = collectives._reduce_scatter_single

    def start_and_wait(*args: Any, **options: Any) -> Any:
        work = start(*args, **options)
        work.wait()
        return work

    with patch.object(collectives, "_reduce_scatter_single", start_and_wait):
        report = alone(check_case, replace(LAYOUTS["tp"], num_microbatches=1), 0)
    assert exposed(report) == ["tp reduce_scatter B: 4 of 4 have nothing beside them"]


def test_the_command_fails_if_it_finds_a_defect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control: a guard that reads from the device. (Without one, docs/proofs.md shows it.)"""
    file = tmp_path / "report.json"
    with DEFECTS["item"][0]:
        assert main(["configs/laptop.yaml", "--races", "--json", str(file)]) == 1
    (finding,) = json.loads(file.read_text(encoding="utf-8"))["findings"]
    assert finding.startswith(f"{SYNC}: aten._local_scalar_dense.default needs a value")
    said = capsys.readouterr().out
    assert f"\n  {finding}\n" in said
    assert "\ntp reduce_scatter B " in said
