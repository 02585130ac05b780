"""The layouts whose overlap is kept in a table, and the comparison with it.

tests/fixtures/overlap.json has, for two ranks of each layout, the rows of tools/streams/overlap.py.
A change that loses overlap (a collective that has become synchronous, a wait that comes earlier)
changes a row. `python -m tools.streams --write` writes the table again, after an intended change.
"""

import json
from pathlib import Path
from typing import Any

from parallel.axes import MeshSizes
from parallel.pipeline.schedules import SCHEDULES
from tools.parity.cases import Case
from tools.parity.run import heads_in_pieces
from tools.plan.candidates import FIXED
from tools.rehearse.rank import alone
from tools.streams.step import check

TABLE = Path(__file__).parent.parent.parent / "tests" / "fixtures" / "overlap.json"
COLUMNS = ("count", "bytes", "bare", "flops")
Table = dict[str, dict[str, list[int]]]  # layout and rank → row → COLUMNS


def _case(layout: MeshSizes, **options: Any) -> Case:
    return Case(layout, **{"dtype": "bfloat16", "kernels": "auto", **options})


_TP = MeshSizes(tp=2)
_3D = MeshSizes(pp=2, dp_shard=2, tp=2)
_HYBRID = MeshSizes(dp_replicate=2, dp_shard=2)

LAYOUTS = {
    "tp": _case(_TP),
    "tp, no sequence parallelism": _case(_TP, sequence_parallel=False),
    "zero 1, hybrid": _case(_HYBRID),
    "zero 2, hybrid": _case(_HYBRID, zero_stage=2),
    "zero 3": _case(MeshSizes(dp_shard=4), zero_stage=3),
    "zero 3, float32, whole stages": _case(
        MeshSizes(dp_shard=2), zero_stage=3, fsdp_unit="stage", dtype="float32"
    ),
    "3D, zero 3, full recomputation": _case(_3D, zero_stage=3, activation_checkpointing="full"),
    "3D, selective recomputation": _case(_3D, activation_checkpointing="selective"),
    "3D, tied, documents": _case(_3D, tie_embeddings=True, document_mask=True),
    # heads of 8 numbers, which flash attention takes
    # of single sequences, whose keys and values are gathered again
    "cp, no recomputation": _case(
        MeshSizes(dp_shard=2, cp=2), attention_dim=64, num_microbatches=16
    ),
    "cp and tp, zero 3, selective, documents": _case(
        MeshSizes(dp_shard=2, cp=2, tp=2),
        attention_dim=64,
        zero_stage=3,
        activation_checkpointing="selective",
        document_mask=True,
    ),
    "cp and pp, zb_h1, full recomputation": _case(
        MeshSizes(pp=2, dp_replicate=2, cp=2),
        attention_dim=64,
        schedule="zb_h1",
        activation_checkpointing="full",
    ),
    "ep, shared expert": _case(
        MeshSizes(dp_shard=2, ep=2), router="softmax", num_shared_experts=1, num_microbatches=2
    ),
    # ep across tp and a part of dp_shard
    "ep and tp, zero 3, selective": _case(
        MeshSizes(dp_shard=4, tp=2, ep=4),
        router="sigmoid_bias",
        router_losses=True,
        num_shared_experts=1,
        zero_stage=3,
        activation_checkpointing="selective",
        num_microbatches=2,
    ),
    "ep and pp, zero 2, zb_h1, full recomputation": _case(
        MeshSizes(pp=2, dp_shard=2, ep=2),
        router="softmax_renormalised",
        num_dense_layers=1,
        schedule="zb_h1",
        zero_stage=2,
        activation_checkpointing="full",
    ),
    "3D, zero 2, zb_h1, no sequence parallelism": _case(
        _3D, schedule="zb_h1", zero_stage=2, sequence_parallel=False
    ),
} | {
    f"pp and tp, {name}": _case(
        MeshSizes(pp=2, tp=2),
        schedule=name,
        stages_per_rank=FIXED.get(name, 2),
    )
    for name in SCHEDULES
}


def _check(case: Case, rank: int) -> dict[str, Any]:
    with heads_in_pieces():
        return check(case.config(), case.world, rank)


# the first and the last rank of each layout
KEYS = {
    f"{name}, rank {rank}": (case, rank)
    for name, case in LAYOUTS.items()
    for rank in (0, case.world - 1)
}


def report_of(key: str) -> dict[str, Any]:
    return alone(_check, *KEYS[key])


def table_of(report: dict[str, Any]) -> dict[str, list[int]]:
    return {name: [row[column] for column in COLUMNS] for name, row in report["overlap"].items()}


def read_table() -> Table:
    table: Table = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def write_table(table: Table) -> None:
    """One line for each row."""
    layouts = []
    for name, rows in table.items():
        lines = [f"  {json.dumps(row)}: {json.dumps(values)}" for row, values in rows.items()]
        layouts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    TABLE.write_text("{\n" + ",\n".join(layouts) + "\n}\n", encoding="utf-8")


def differences(kept: dict[str, list[int]], found: dict[str, list[int]]) -> list[str]:
    """What changed, one line for each row; an empty list if nothing did."""
    lines = []
    for row in sorted(kept.keys() | found.keys()):
        before, after = kept.get(row), found.get(row)
        if before is None or after is None:
            lines.append(f"{row}: {'new' if before is None else 'gone'}")
        elif before != after:
            pairs = zip(COLUMNS, before, after, strict=True)
            changes = [f"{column} {a:,} → {b:,}" for column, a, b in pairs if a != b]
            lines.append(f"{row}: " + ", ".join(changes))
    return lines
