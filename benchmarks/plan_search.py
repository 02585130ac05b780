"""Times the planner's search on easy, hard and unsolvable jobs: `python -m benchmarks.plan_search`

Each row is measured in a separate process, one after the other. Seconds are those of
`plan.search.search` only. The peak resident memory includes about 0.26 GB for Python and torch.
Aim: at most two minutes of CPU for every row.
"""

import json
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.about import about
from errors import UserError
from tools.command import CommandParser, run_command
from tools.plan.hardware import find_device
from tools.plan.search import search
from training.load_config import load_config

ROOT = Path(__file__).parent.parent
LIMIT = 120.0  # CPU seconds

GPT3 = (
    "model.dim=12288 model.num_layers=96 model.num_heads=96 model.num_kv_heads=96 "
    "model.ffn_dim=32768 model.vocab_size=51200 "
    "train.seq_len=2048 parallel.tp_pieces=1"
)


class Row(NamedTuple):
    """A job for which to search layouts."""

    name: str
    configuration: str
    gpus: int
    device: str = "h100"
    overrides: str = ""


ROWS = [
    Row("8B", "llama3_8b", 8),
    Row("8B", "llama3_8b", 64),
    Row("70B, hard to fit", "llama3_70b", 64),
    Row("70B", "llama3_70b", 256),
    Row("175B, up to 1536 micro-batches", "llama3_70b", 64, "a100",
        f"{GPT3} train.global_batch_size=1536"),
    Row("175B, hard to fit, few micro-batches", "llama3_70b", 40, "a100",
        f"{GPT3} train.global_batch_size=80"),
    Row("405B, hard to fit", "llama3_405b", 128),
    Row("405B", "llama3_405b", 512),
    Row("405B", "llama3_405b", 16384),
    Row("405B, 16,384 sequences", "llama3_405b", 16384, "h100", "train.global_batch_size=16384"),
    Row("405B, hopeless", "llama3_405b", 8),
    Row("405B, hopeless, nearly fits", "llama3_405b", 96),
]  # fmt: skip


def measure(row: Row) -> dict[str, Any]:
    """Times one search."""
    config, device = (
        load_config(str(ROOT / "configs" / f"{row.configuration}.yaml"), row.overrides.split()),
        find_device(row.device),
    )
    found: dict[str, Any]
    cpu, wall = time.process_time(), time.perf_counter()
    try:
        result = search(config, row.gpus, device)
        found = {
            "layouts": result.layouts,
            "counted": result.counted,
            "best_step_seconds": result.best[0].seconds,
        }
    except UserError as error:
        found = {"error": str(error)}
    found |= {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (
        row._asdict()
        | found
        | {"peak_resident_bytes": kilobytes * (1 if sys.platform == "darwin" else 1024)}
    )


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/plan_search.json")
    arguments = parser.parse_args()
    table = []
    print("   CPU s   wall s  peak GB  layouts  counted  job")
    with ProcessPoolExecutor(
        max_workers=1, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        for found in pool.map(measure, ROWS):
            table.append(found)
            gigabytes = found["peak_resident_bytes"] / 1e9
            numbers = (
                f"{found['layouts']:8,} {found['counted']:8,}"
                if "layouts" in found
                else f"{'nothing fits':>17s}"
            )
            print(
                f"{found['cpu_seconds']:8.2f} {found['wall_seconds']:8.2f} {gigabytes:8.2f} "
                f"{numbers}  {found['name']} "
                f"on {found['gpus']} {found['device']}",
                flush=True,
            )
    slowest = max(found["cpu_seconds"] for found in table)
    print(f"slowest: {slowest:.1f} s of CPU (aim: {LIMIT:g})")
    results: dict[str, Any] = about()
    arguments.json.write_text(
        json.dumps(results | {"rows": table, "slowest": slowest}, indent=1) + "\n", encoding="utf-8"
    )
    return 0 if slowest <= LIMIT else 1


if __name__ == "__main__":
    run_command(main)
