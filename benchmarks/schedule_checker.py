"""Times the pure functions of pipeline schedules with 10,000 actions on each of four ranks: `python
-m benchmarks.schedule_checker`

Times building a schedule, simulating it, and checking it: completeness, order, and its programs on
a network without buffers. No module here imports torch. Results are the best of three, in
wall-clock seconds for all four ranks together; aim: each below one second.
"""

import json
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.about import about
from parallel.pipeline.actions import splits_backward
from parallel.pipeline.check import check
from parallel.pipeline.schedules import SCHEDULES, build_schedule
from parallel.pipeline.simulate import Costs, simulate
from tools.command import CommandParser, run_command

ROOT = Path(__file__).parent.parent
RANKS, ACTIONS = 4, 10_000
STAGES_PER_RANK = {"interleaved_1f1b": 2, "breadth_first": 2, "zb_v": 2, "dualpipe_v": 2}


def seconds(name: str) -> dict[str, float]:
    """The seconds to build, simulate and check one schedule."""
    v = STAGES_PER_RANK.get(name, 1)
    kinds = 3 if splits_backward(build_schedule(name, RANKS, v, 2 * RANKS)) else 2
    m = ACTIONS // (kinds * v) // RANKS * RANKS
    rounds = []
    for _ in range(3):
        times = [time.perf_counter()]
        schedule = build_schedule(name, RANKS, v, m)
        times.append(time.perf_counter())
        simulate(schedule, Costs.equal(RANKS * v))
        times.append(time.perf_counter())
        check(schedule)
        times.append(time.perf_counter())
        rounds.append([b - a for a, b in pairwise(times)])
    return dict(
        zip(("build", "simulate", "check"), map(min, zip(*rounds, strict=True)), strict=True)
    )


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--json", type=Path, default=ROOT / "benchmarks/results/schedule_checker.json"
    )
    arguments = parser.parse_args()
    results: dict = about()
    results |= {
        "ranks": RANKS,
        "actions_per_rank": ACTIONS,
        "seconds": {name: seconds(name) for name in SCHEDULES},
    }
    for name, found in results["seconds"].items():
        print(f"{name:18}" + "".join(f"{what} {value:6.3f} s   " for what, value in found.items()))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
