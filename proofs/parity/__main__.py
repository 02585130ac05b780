"""The parity proof: `python -m proofs.parity [--world N] [--quick] [--json FILE]`.

Every way to split the model must compute the same as the unsharded model (reference.py). For every
layout of 1, 2, 4 and 8 ranks, it compares initial weights, loss, gradient norm, every parameter's
gradient, and 20 optimizer steps, in float64 and in float32. Then it compares every schedule,
context parallelism with single sequences, and a covering array over layouts and options, in
float64. Of mixtures of experts it compares every layout with every ep of 1, 2 and 4, a
covering array, and loads as uneven as they can be, with the experts that each token chooses, the
routers' losses, and biases after 3 steps (expert_cases.py). With TRITON_INTERPRET=1 before the
command (or on a GPU machine), it also compares the model with Triton's kernels. It prints one line
per case with the largest relative errors, and exits with status 1 if any is out of bounds (row.py).
On two cores, over gloo, all cases together take minutes.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from model.kernels.backend import why_not_triton
from parallel.axes import MeshSizes
from proofs.parity.cases import QUICK_LAYOUTS, STEPS, Case, Pair, covering_cases, option_values
from proofs.parity.chosen import context_cases, kernel_cases, schedule_cases
from proofs.parity.expert_cases import LAYOUTS as EXPERT_LAYOUTS
from proofs.parity.expert_cases import STEPS as EXPERT_STEPS
from proofs.parity.expert_cases import expert_layout_cases, expert_values, extreme_cases
from proofs.parity.row import BOUNDS, Row, as_json, line
from proofs.parity.run import check
from proofs.ranks import Ranks
from tools.command import CommandParser, run_command

WORLDS = (1, 2, 4, 8)


def layouts_of(worlds: tuple[int, ...], quick: bool) -> list[MeshSizes]:
    layouts = [sizes for world in worlds for sizes in MeshSizes.all_of(world)]
    return [
        sizes
        for sizes in layouts
        if Case(sizes).is_valid() and (not quick or sizes in QUICK_LAYOUTS)
    ]


def plan(worlds: tuple[int, ...], quick: bool) -> tuple[list[tuple[Case, int]], list[Pair]]:
    """Return the cases, each with its number of optimizer steps, and the pairs of option values
    that no valid case contains."""
    layouts = layouts_of(worlds, quick)
    # Without a pipeline, two micro-batches are enough to show every error of accumulation.
    bases = [(Case(sizes, num_microbatches=4 if sizes.pp > 1 else 2), STEPS) for sizes in layouts]
    bases = (
        []
        if quick
        else [(replace(case, dtype=dtype), steps) for case, steps in bases for dtype in BOUNDS]
    )
    combined, impossible = covering_cases({"layout": layouts, **option_values()})
    of_experts = [sizes for sizes in EXPERT_LAYOUTS if sizes.world in worlds]
    with_experts, impossible_too = covering_cases(expert_values(of_experts))
    chosen = [] if quick else expert_layout_cases(worlds) + extreme_cases(worlds)
    schedules = [] if quick else schedule_cases(worlds)
    context = [] if quick else context_cases(worlds)
    kernels = [] if quick or why_not_triton("cpu") else kernel_cases(worlds)
    cases = bases + [(case, 0) for case in schedules + context + kernels + combined]
    cases += [(case, EXPERT_STEPS) for case in with_experts + chosen]
    return cases, impossible + impossible_too


def run(ranks: Ranks, cases: list[tuple[Case, int]]) -> Iterator[tuple[Row, int]]:
    for case, steps in cases:
        yield check(ranks, case, steps), steps


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m proofs.parity", description=__doc__)
    parser.add_argument(
        "--world", type=int, metavar="N", help="only layouts of N ranks (default: 1, 2, 4 and 8)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only the covering arrays over a few layouts, in minutes",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="over a process group that orders communication as strictly as NCCL (proofs/strict)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row to FILE")
    options = parser.parse_args(arguments)
    worlds = (options.world,) if options.world else WORLDS
    started = time.monotonic()
    cases, impossible = plan(worlds, options.quick)
    print(f"{len(cases)} cases; {len(impossible)} pairs of options are incompatible", flush=True)
    rows = []
    with Ranks(max(worlds), backend="strict" if options.strict else "gloo") as ranks:
        for row, steps in run(ranks, cases):
            rows.append((row, steps))
            print(line(row, steps), flush=True)
    failed = [row for row, _ in rows if row.failures()]
    seconds = time.monotonic() - started
    for dtype in BOUNDS:
        finished = [row for row, _ in rows if row.case.dtype == dtype and not row.crash]
        if finished:
            worst = {name: max(getattr(row, name) for row in finished) for name in BOUNDS[dtype]}
            print(
                f"{dtype} worst:",
                *(
                    f"{name} {value:.1e} (≤ {BOUNDS[dtype][name]:.0e})"
                    for name, value in worst.items()
                ),
            )
    print(f"{len(rows) - len(failed)} of {len(rows)} cases within bounds, {seconds:.0f} s")
    if options.json:
        report = {
            "passed": not failed,
            "seconds": seconds,
            "bounds": BOUNDS,
            "impossible_pairs": impossible,
            "rows": [as_json(row, steps) for row, steps in rows],
        }
        options.json.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    run_command(main)
