"""The cases of the budget, and how one is recorded.

A block is recorded as the middle stage of a pipeline of three blocks, so that nothing but one block
is on the rank. A step has an embedding, two blocks, the head and two micro-batches: what each of
them adds can be seen, and more blocks only repeat it. In both, all widths are the true ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.budget_ledger import Ledger, Operation, Temporary, recording
from benchmarks.budget_places import OF_A_BLOCK, PASSES
from tools.rehearse.fake_gpu import DEVICE, fake_gpu
from tools.rehearse.rank import alone, build_without_data, routing_of, rows, the_rank
from training.config import Config
from training.load_config import load_config
from training.step import TrainStep

CONFIGS = Path(__file__).parent.parent / "configs"
MODES = ("none", "selective", "full")
MODELS = {"8B": ("llama3_8b.yaml", 1), "70B": ("llama3_70b.yaml", 8)}  # configuration, tp
PIPELINE = ("parallel.schedule=1f1b", "parallel.stages_per_rank=1", "parallel.tp_pieces=1")
STEP_BLOCKS, STEP_MICROBATCHES = 2, 2
TEMPORARIES = 2  # of each pass: the largest are listed


@dataclass(frozen=True)
class Case:
    """One rank of a job, of which one step is recorded."""

    name: str
    model: str
    keys: tuple[str, ...]
    world: int
    rank: int = 0

    @property
    def is_block(self) -> bool:
        return "block" in self.name

    def config(self) -> Config:
        return load_config(str(CONFIGS / MODELS[self.model][0]), list(self.keys))


def block(model: str, mode: str, *more: str) -> Case:
    """One block and one micro-batch, without data parallelism."""
    tp = MODELS[model][1]
    keys = (
        f"parallel.tp={tp}", "parallel.pp=3", "parallel.dp_shard=1", "parallel.zero_stage=0",
        *PIPELINE, "parallel.layers_per_stage=[1,1,1]", "model.num_layers=3",
        "train.seq_len=8192", "train.micro_batch_size=1", "train.global_batch_size=1",
        f"train.activation_checkpointing={mode}", *more,
    )  # fmt: skip
    return Case(f"{model} tp {tp} block, {mode}", model, keys, 3 * tp, tp)


def experts_block(mode: str) -> Case:
    """A block of Mixtral 8x7B, which has the widths of Llama 3 8B, and each of its 8 experts on a
    rank of its own. Every expert receives as many rows."""
    keys = ("parallel.dp_shard=8", "parallel.ep=8", "parallel.zero_stage=1",
            "train.global_batch_size=8", "model.feed_forward=experts", "model.num_experts=8",
            "model.experts_per_token=2")  # fmt: skip
    like = block("8B", mode, *keys)
    return replace(like, name=f"8x7B ep 8 block, {mode}", world=24, rank=8)


def step(model: str, zero_stage: int, dp_shard: int, *more: str) -> Case:
    """A whole step, without recomputation and without pipeline parallelism."""
    tp = MODELS[model][1]
    keys = (
        f"parallel.tp={tp}", "parallel.pp=1", f"parallel.dp_shard={dp_shard}",
        f"parallel.zero_stage={zero_stage}", *PIPELINE,
        f"model.num_layers={STEP_BLOCKS}", "train.seq_len=8192", "train.micro_batch_size=1",
        f"train.global_batch_size={STEP_MICROBATCHES * dp_shard}",
        "train.activation_checkpointing=none", *more,
    )  # fmt: skip
    return Case(f"{model} tp {tp} step, ZeRO-{zero_stage}, dp_shard {dp_shard}", model, keys,
                tp * dp_shard)  # fmt: skip


CASES = [
    *(block(model, mode) for model in MODELS for mode in MODES),
    *(experts_block(mode) for mode in ("none", "selective")),
    *(step("8B", zero_stage, 1) for zero_stage in (0, 1, 2, 3)),
    *(step("8B", zero_stage, 8) for zero_stage in (1, 2, 3)),
    *(step("70B", zero_stage, 8) for zero_stage in (1, 3)),
]


def without_waiting(tensor: Tensor, device: str) -> Tensor:
    """Take the place of parallel.mesh.to_device. The fake GPU has no pinned memory, from which a
    copy would start without making the host wait."""
    return tensor.to(device, non_blocking=True)


def record(case: Case) -> Ledger:
    """Record the second step of the case, in this process; the first one fills caches. A process
    can be only one rank of one world: see `budget`."""
    config = case.config()
    config.validate(case.world)
    with (
        the_rank(config, case.world, case.rank, DEVICE) as mesh,
        fake_gpu(to_device=without_waiting),
    ):
        stages, experts = build_without_data(config, mesh), routing_of(config, mesh, imbalance=1.0)
        with recording(mesh) as ledger, experts:
            experts.reads = ledger.numbers_read
            train = TrainStep(config, mesh, stages, bos_id=0)
            train.record = ledger.record
            for number in range(2):
                ledger.clear()
                result = train(number, *rows(config, mesh))
        del result, train
    return ledger


def budget(case: Case) -> dict[str, Any]:
    """The case's budget, recorded in a separate process: {"rows": …, "temporaries": …}."""
    return alone(_budget, case)


def _budget(case: Case) -> dict[str, Any]:
    ledger = record(case)
    passes = OF_A_BLOCK if case.is_block else tuple(PASSES)
    return {
        "rows": [row for row in table(ledger.operations) if row["pass"] in passes],
        "temporaries": largest(ledger.temporaries, passes),
    }


def largest(temporaries: Iterable[Temporary], passes: Iterable[str]) -> list[dict[str, Any]]:
    """The largest temporary tensors of each pass, one for each place."""
    found = []
    for part in passes:
        of_place: dict[str, Temporary] = {}
        for each in temporaries:
            if each.part == part and each.bytes > getattr(of_place.get(each.where.key), "bytes", 0):
                of_place[each.where.key] = each
        found += sorted(of_place.values(), key=lambda each: -each.bytes)[:TEMPORARIES]
    return [
        {"pass": t.part, "where": t.where.key, "line": t.where.line, "bytes": t.bytes}
        for t in found
    ]


def table(operations: Iterable[Operation]) -> list[dict[str, Any]]:
    """The operations in rows: those of one pass, kind, name and place are added up. A row holds
    only figures that are not 0."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for done in operations:
        key = (done.part, done.kind, done.name, done.where.key)
        row = found.setdefault(
            key,
            dict(zip(("pass", "kind", "name", "where"), key, strict=True))
            | {"line": done.where.line},
        )
        figures = {
            "launches": done.launches,
            "bytes": done.bytes,
            "flops": done.flops,
            "waits": int(done.waits),
            "for_nothing": int(done.for_nothing),
            "unread": done.unread,
            "flops_for_nothing": done.flops * done.for_nothing,
        }
        for name, figure in figures.items():
            if figure:
                row[name] = row.get(name, 0) + figure
    order = list(PASSES)
    return sorted(found.values(), key=lambda row: order.index(row["pass"]))
