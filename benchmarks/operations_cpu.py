"""Measures the CPU time of what looks after the machines in an undisturbed run, as a share of the
CPU time of `make train`'s step: `python -m benchmarks.operations_cpu`

    slow ranks    the listener, its part of the all-reduce of stop requests, the judge, and the
                  timing of each product (the calls, times the cost of one, measured in a loop)
    examination   the listener, while nothing is suspected

The run is that of `make train`: 8 processes, the same model and batch, logged every 10 steps. CPU
times are those of the thread that trains, and the step's that of all threads; both are summed over
the processes. `--noise FILE` instead logs every step, and keeps what each rank measured of its
products, for tests/test_slow_ranks.py.
"""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from benchmarks.about import about
from proofs.ranks import Ranks
from runtime.health.examine import Examination
from runtime.health.judge import Judge
from runtime.health.slow_ranks import SlowRanks, TimedProducts
from tests.runs import train_run
from tools.command import CommandParser, run_command

ROOT = Path(__file__).parent.parent
CONFIG, RANKS = "configs/laptop.yaml", 8
PARTS = {"slow_ranks": SlowRanks, "examination": Examination}
METHODS = ("before_step", "after_step", "_post", "_judge")
CALLS = 20_000


def counted(spent: Counter[str], part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return method(*arguments)
        finally:
            spent[part] += time.thread_time() - began  # type: ignore[assignment]

    return call


def cost_of_timing() -> float:
    """CPU seconds that timing adds to a product."""
    marks: dict[Any, list[Any]] = {("layer", "forward"): []}
    timed = TimedProducts(None, "layer", marks, time.perf_counter)  # type: ignore[arg-type]
    seconds = []
    for call in (lambda: timed.around("forward", int), int):
        began = time.thread_time()
        for _ in range(CALLS):
            marks["layer", "forward"].clear()
            call()
        seconds.append(time.thread_time() - began)
    return (seconds[0] - seconds[1]) / CALLS


def measure(arguments: list[str]) -> dict[str, float]:
    """On each rank: CPU seconds per step by part."""
    spent: Counter[str] = Counter()
    calls, steps = [0], [0, 0.0]
    around, after = TimedProducts.around, SlowRanks.after_step

    def counting(self: TimedProducts, *rest: Any) -> Any:
        calls[0] += 1
        return around(self, *rest)

    patches = [
        patch.object(kind, method, counted(spent, part, getattr(kind, method)))
        for part, kind in PARTS.items()
        for method in METHODS
        if hasattr(kind, method)
    ]
    patches.append(patch.object(TimedProducts, "around", counting))
    for each in patches:
        each.start()
    inner = SlowRanks.after_step

    def noting(self: SlowRanks, run: Any) -> None:
        if steps[0] == 2:  # the first two allocate and connect
            spent.clear()
            calls[0], steps[1] = 0, time.process_time()
        steps[0] += 1
        inner(self, run)
        steps.append(time.process_time())

    try:
        with patch.object(SlowRanks, "after_step", noting):
            assert train_run(arguments) == ""
    finally:
        for each in patches:
            each.stop()
    assert SlowRanks.after_step is after
    number = steps[0] - 2
    return {
        "step": (steps[-1] - steps[1]) / number,
        "slow_ranks": (spent["slow_ranks"] + calls[0] * cost_of_timing()) / number,
        "examination": spent["examination"] / number,
        "timed_calls": calls[0] / number,
    }


def noise(arguments: list[str]) -> dict[str, Any] | None:
    """Train, and return on rank 0 what all ranks measured in each interval, in microseconds."""
    times: list[list[int]] = []
    judges: list[SlowRanks] = []
    judge, init = SlowRanks._judge, Judge.__init__
    roles: list[int] = []

    def kept(self: SlowRanks, found: list[int]) -> None:
        times.append(found)
        judges.append(self)
        judge(self, found)

    def known(self: Judge, of_ranks: list[int], limit: float) -> None:
        roles[:] = of_ranks
        init(self, of_ranks, limit)

    with patch.object(SlowRanks, "_judge", kept), patch.object(Judge, "__init__", known):
        assert train_run(arguments) == ""
    return {"roles": roles, "times": times} if dist.get_rank() == 0 else None


def main() -> None:
    parser = CommandParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=62)
    parser.add_argument("--noise", type=Path, help="write the noise of each interval to this file")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/operations_cpu.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Ranks(RANKS, timeout=3600) as ranks:
        arguments = [CONFIG, f"run.dir={folder}/run", f"train.steps={options.steps}"]
        arguments += ["train.eval_interval=0", "checkpoint.interval=never"]
        if options.noise:
            found = ranks.run(noise, RANKS, [*arguments, "run.log_interval=1"])[0]
            options.noise.write_text(json.dumps(found) + "\n", encoding="utf-8")
            return
        everyone = ranks.run(measure, RANKS, arguments)
    total = {key: sum(rank[key] for rank in everyone) for key in everyone[0]}
    parts = {part: {"cpu_seconds": total[part], "share": total[part] / total["step"]}
             for part in PARTS}  # fmt: skip
    result = {
        **about(),
        "config": CONFIG,
        "steps": options.steps,
        "step_cpu_seconds": total["step"],
        "timed_calls_per_step": total["timed_calls"],
        "parts": parts,
        "share": sum(part["share"] for part in parts.values()),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    run_command(main)
