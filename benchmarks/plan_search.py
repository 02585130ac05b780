"""Times the planner's search on easy, hard and unsolvable jobs: `python -m benchmarks.plan_search`

Each job is measured in a separate process, one after the other. Seconds are those of
`plan.search.search` only. The peak resident memory includes about 0.26 GB for Python and torch.
Aim: at most two minutes of CPU for every job.
"""

import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

from benchmarks.compare import ROOT, parser, timed, write
from errors import UserError
from tools.command import run_command
from tools.plan.hardware import find_device
from tools.plan.search import search
from training.load_config import load_config

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
    path, device = ROOT / "configs" / f"{row.configuration}.yaml", find_device(row.device)
    config = load_config(str(path), row.overrides.split())
    found: dict[str, Any] = {}

    def work() -> None:
        try:
            result = search(config, row.gpus, device)
            seconds = result.best[0].seconds
            found.update(layouts=result.layouts, counted=result.counted, best_step_seconds=seconds)
        except UserError as error:
            found["error"] = str(error)

    took = timed(work)
    found |= {"cpu_seconds": took.cpu_seconds, "wall_seconds": took.seconds}
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found["peak_resident_bytes"] = kilobytes * (1 if sys.platform == "darwin" else 1024)
    return row._asdict() | found


def main() -> int:
    options = parser("plan_search", __doc__)
    options.add_argument("--only", default="", metavar="TEXT", help="jobs with TEXT in their names")
    chosen = options.parse_args()
    jobs, table = [row for row in ROWS if chosen.only in f"{row.name} on {row.gpus}"], []
    with ProcessPoolExecutor(
        max_workers=1, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        for found in pool.map(measure, jobs):
            table.append(found)
            fits = f"{found['layouts']:,} layouts" if "layouts" in found else "nothing fits"
            print(f"{found['cpu_seconds']:8.2f} s of CPU  {found['name']} on {found['gpus']} "
                  f"{found['device']}: {fits}", flush=True)  # fmt: skip
    slowest = max(found["cpu_seconds"] for found in table)
    write(chosen.json, {"rows": table, "slowest": slowest})
    print(f"slowest: {slowest:.1f} s of CPU (aim: {LIMIT:g})")
    return 0 if slowest <= LIMIT else 1


if __name__ == "__main__":
    run_command(main)
