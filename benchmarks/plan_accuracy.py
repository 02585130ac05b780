"""Compares the planner with rehearsals, and with what others have published.

    python -m benchmarks.plan_accuracy                all of it, in a few minutes
    python -m benchmarks.plan_accuracy rehearsed      memory and collectives
    python -m benchmarks.plan_accuracy fitted published   speed

rehearsed   A rehearsal executes the training code of one rank with a fake GPU. Peak memory must
            agree within 0.1 %, and collectives exactly: their number and bytes for every axis and
            kind.
fitted      The planner's efficiencies (hardware.py) were fitted to Megatron-LM's weak scaling on
            H100. Aim: MFU within 3 points on average, 6 at most.
published   They were not fitted to the rows of other systems. Every row is planned with the same
            constants, except for those that a publication states for its own machines or kernels
            (memory and network bandwidth, cuDNN's attention). If the system does other work than
            the planner assumes, the column `apart` names it.

MFU is in the convention of the publication, with Lattice's operations per token: attention `full`
is the whole square, and `causal` is half of it. Published tokens per second are converted to MFU in
this way; published MFU is used unchanged. Cases and rows are in published/*.yaml, which
published/README.md explains; the results keep only summaries.
"""

import itertools
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from costs.summary import flops_per_token
from errors import UserError
from hardware import Device
from settings.checks import validate
from settings.config import Config
from settings.load import load_config
from settings.yaml_text import parse
from tools.command import CommandParser, run_command
from tools.plan.hardware import find_device
from tools.plan.layout import Layout
from tools.plan.search import Found
from tools.rehearse.__main__ import beside_the_plan
from tools.rehearse.rank import alone, rehearse

HERE = Path(__file__).parent
CONFIGS, PUBLISHED = HERE.parent / "configs", HERE / "published"
RESULTS = HERE / "results" / "plan_accuracy.json"
MEMORY_LIMIT = 0.001
MEAN_LIMIT, LARGEST_LIMIT = 3.0, 6.0  # points of MFU, of the rows that were fitted


def read(name: str) -> Any:
    return parse((PUBLISHED / f"{name}.yaml").read_text(encoding="utf-8"))


# --- memory and collectives ---


class Case(NamedTuple):
    """A rank of a job."""

    configuration: str
    common: str  # settings of all cases of its group
    world: int
    rank: int
    settings: str
    tier: str = ""  # "test" or "thorough", if it is cheap: tests/plan/test_plan.py uses these

    def config(self) -> Config:
        keys = f"{self.common} {self.settings}".split()
        return load_config(str(CONFIGS / f"{self.configuration}.yaml"), keys)


CASES = [
    Case(group["configuration"], group.get("settings", ""), *case)
    for group in read("rehearsed")
    for case in group["cases"]
]
SMALL = CASES[0].common.split()  # a small model


def compare_rehearsed(case: Case) -> dict[str, Any]:
    config = case.config()
    validate(config, case.world)
    measured = alone(rehearse, config, case.world, case.rank)
    number = sum(row["count"] for row in measured["collectives"].values())
    about = {"rehearsed_bytes": measured["peak_memory_bytes"], "collectives": number}
    return beside_the_plan(config, measured) | about


def rehearsed() -> tuple[dict[str, Any], bool]:
    found = []
    print("  planned GB  rehearsed GB    error  collectives")
    for case in CASES:
        row = compare_rehearsed(case)
        found.append(row)
        alike = "the same" if row["same_collectives"] else "DIFFERENT"
        print(
            f"{row['peak_memory_bytes'] / 1e9:12.3f} {row['rehearsed_bytes'] / 1e9:13.3f} "
            f"{row['error']:+8.3%} {row['collectives']:7,} {alike}  {case.configuration} "
            f"rank {case.rank} of {case.world} {case.settings}",
            flush=True,
        )
    worst = max(abs(row["error"]) for row in found)
    same = all(row["same_collectives"] for row in found)
    print(f"largest error {worst:.3%} (aim: {MEMORY_LIMIT:.1%})")
    results = {"cases": len(found), "largest_error": worst, "same_collectives": same}
    return results, same and worst <= MEMORY_LIMIT


# --- speed ---

# cuDNN's attention reaches 539 TFLOP/s where flash attention 2 reaches 335 (H100, forward, causal,
# heads of 128, 16,384 tokens: arxiv.org/abs/2407.08608, figure 5).
CUDNN = {"attention_efficiency": Device.attention_efficiency * 539 / 335}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published figure, with the settings of its system (published/README.md)."""

    name: str
    source: str
    differs: str
    unverified: str = ""
    apart: str = ""
    device: str = "h100"
    rates: dict[str, float] = field(default_factory=dict)
    cudnn: bool = False
    attention: str = "full"
    model: str
    dimensions: dict[str, Any]
    gpus: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    stages: int = 1
    replicas: int = 1
    batch: int
    micro_batch: int = 0  # 0: chosen
    recomputed: str = "none"
    seq_len: int
    zero_stage: int
    reduce_dtype: str = "float32"
    sequence_parallel: bool = True
    mfu: float = 0.0
    teraflops: float = 0.0
    tokens: float = 0.0
    all_tokens: float = 0.0

    @property
    def has_experts(self) -> bool:
        return "experts.count" in self.dimensions

    @property
    def on(self) -> Device:
        rates: dict[str, Any] = self.rates | (CUDNN if self.cudnn else {})
        return replace(find_device(self.device), **rates)

    @cached_property
    def found(self) -> Found:
        return plan(self)

    # MFU in the convention of the row

    @property
    def whole(self) -> float:
        """The tokens per second and GPU at an MFU of 1."""
        config = self.found.config
        flops = flops_per_token(config.model, config.train.seq_len, self.attention == "full")
        return self.on.peak_flops / flops

    @property
    def published(self) -> float:
        if self.teraflops:
            return self.teraflops * 1e12 / self.on.peak_flops
        tokens = self.tokens or self.all_tokens / self.gpus
        return tokens / self.whole if tokens else self.mfu / 100

    @property
    def planned(self) -> float:
        return self.batch * self.seq_len / self.found.seconds / self.gpus / self.whole

    @property
    def points(self) -> float:
        return 100 * (self.planned - self.published)


def rows_of(name: str) -> list[Row]:
    content, rows = read(name), []
    for system in content["systems"]:
        shared = {key: value for key, value in system.items() if key != "rows"}
        for given in system["rows"]:
            keys = shared | given
            dimensions = content["models"][keys["model"]]
            dimensions = {"num_kv_heads": dimensions["num_heads"], **dimensions}
            rows.append(Row(**keys, dimensions=dimensions))
    return rows


OF_PARALLEL = ("tp", "cp", "pp", "ep", "zero_stage", "reduce_dtype", "sequence_parallel")
FITTED = rows_of("fitted")
ROWS = [*rows_of("dense"), *rows_of("experts")]


def config_of(row: Row) -> Config:
    """The configuration of a row. Settings not in the row are those of llama3_70b.yaml."""
    dp = row.gpus // (row.tp * row.cp * row.pp)
    replicas = dp if row.zero_stage == 0 else row.replicas
    keys: dict[str, Any] = {f"model.{key}": value for key, value in row.dimensions.items()}
    keys |= {f"parallel.{key}": getattr(row, key) for key in OF_PARALLEL}
    keys |= {
        "parallel.dp_replicate": replicas,
        "parallel.dp_shard": dp // replicas,
        "parallel.schedule": "1f1b" if row.stages == 1 else "interleaved_1f1b",
        "parallel.stages_per_rank": row.stages,
        "parallel.tp_pieces": 1,
        "parallel.layers_per_stage": layers_of(row),
        "train.seq_len": row.seq_len,
        "train.global_batch_size": row.batch,
        "train.micro_batch_size": row.micro_batch,
        "train.activation_checkpointing": row.recomputed,
    }
    overrides = [f"{key}={value}" for key, value in keys.items()]
    return load_config(str(CONFIGS / "llama3_70b.yaml"), overrides)


def layers_of(row: Row) -> str:
    """The number of layers of each stage. If they cannot be split evenly, the first and last
    stages, which have the embedding and the head, get one layer less."""
    layers, stages = row.dimensions["num_layers"], row.pp * row.stages
    each = (layers + 2) // stages
    return str([each - 1, *[each] * (stages - 2), each - 1]) if layers % stages else "null"


def plan(row: Row) -> Found:
    if row.micro_batch:
        return Found(config_of(row), row.gpus, row.on)
    for mode in ("none", "selective", "full"):
        configs = choices(replace(row, recomputed=mode))
        found = [Found(config, row.gpus, row.on) for config in configs]
        for one in sorted(found, key=lambda one: one.seconds):
            if one.fits(row.on.room):
                return one
    raise UserError("model", row.model, f"does not fit on {row.gpus} GPUs", "use more GPUs")


def choices(row: Row) -> Iterable[Config]:
    """What a row may have left open: micro-batches of 1, 2, 4 or 8 sequences, and any number of
    virtual stages up to 8 that divides the layers."""
    layers = row.dimensions["num_layers"]
    stages = [v for v in range(1, 9) if v == 1 or (row.pp > 1 and layers % (row.pp * v) == 0)]
    for size, v in itertools.product((1, 2, 4, 8), stages):
        config = config_of(replace(row, micro_batch=size, stages=v))
        try:
            layout = Layout(config, row.gpus, 0)
            if config.num_microbatches(layout.sizes.dp) and layout.schedule:
                yield config
        except UserError:  # a schedule that does not take this number of micro-batches
            continue


def show(rows: Iterable[Row]) -> None:
    print(
        f"{'system':17} {'model':18}    GPUs  tp pp  v micro recomputed published planned  error  "
        "apart (*: settings not all verified)"
    )
    for row in rows:
        parallel, train = row.found.config.parallel, row.found.config.train
        print(
            f"{row.name + '*' * bool(row.unverified):17} {row.model:18} {row.gpus:7d} {row.tp:3d} "
            f"{row.pp:2d} {parallel.stages_per_rank:2d} {train.micro_batch_size:5d} "
            f"{train.activation_checkpointing:10} {row.published:9.1%} {row.planned:7.1%} "
            f"{row.points:+6.1f}  {row.apart}",
            flush=True,
        )


def errors(rows: Iterable[Row]) -> dict[str, float]:
    """The number of rows, and their mean, largest and signed mean error in points."""
    points = [row.points for row in rows]
    far = [abs(one) for one in points]
    return {"rows": len(points), "mean": statistics.fmean(far), "largest": max(far),
            "bias": statistics.fmean(points)}  # fmt: skip


def fitted() -> tuple[dict[str, Any], bool]:
    show(FITTED)
    found = errors(FITTED)
    print(
        f"error: {found['mean']:.2f} points on average (aim: {MEAN_LIMIT:g}), "
        f"{found['largest']:.2f} at most (aim: {LARGEST_LIMIT:g})"
    )
    return found, found["mean"] <= MEAN_LIMIT and found["largest"] <= LARGEST_LIMIT


def published() -> tuple[dict[str, Any], bool]:
    """For each group of rows, its errors. Mixtures of experts are groups of their own."""
    show(ROWS)
    table = [row for row in ROWS if not row.has_experts]
    experts = [row for row in ROWS if row.has_experts]
    alike = [row for row in table if not row.apart]
    with_cp = [row for row in alike if row.cp > 1]
    # Without cp, Llama 3's row would have one micro-batch for 16 pipeline stages.
    of_nemo = [row for row in with_cp if row.name == "NeMo"]
    groups = {
        "all": table,
        "comparable": alike,
        "    of these, H100": [row for row in alike if row.device == "h100"],
        "    of these, A100": [row for row in alike if row.device == "a100"],
        "    of these, every setting verified": [row for row in alike if not row.unverified],
        "    of these, with context parallelism": with_cp,
        "        of these, NeMo's": of_nemo,
        "        NeMo's, planned without it": [replace(row, cp=1) for row in of_nemo],
        "not comparable": [row for row in table if row.apart],
        "experts, comparable": [row for row in experts if not row.apart],
        "experts, not comparable": [row for row in experts if row.apart],
    }
    summary = {name: errors(rows) for name, rows in groups.items()}
    print(f"\n{'':36s}rows   mean  largest  mean, signed")
    for name, one in summary.items():
        print(
            f"{name:36s}{one['rows']:4.0f} {one['mean']:6.2f} {one['largest']:8.2f} "
            f"{one['bias']:+14.2f}"
        )
    return summary, True


PARTS = {part.__name__: part for part in (rehearsed, fitted, published)}


def main() -> int:
    parser = CommandParser(prog="python -m benchmarks.plan_accuracy", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {unknown.pop()}; choose from {', '.join(PARTS)}")
    text = options.json.read_text(encoding="utf-8") if options.json.exists() else "{}"
    results: dict[str, Any] = json.loads(text)
    met = []
    for name in options.parts or PARTS:
        results[name], good = PARTS[name]()
        met.append(good)
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if all(met) else 1


if __name__ == "__main__":
    run_command(main)
