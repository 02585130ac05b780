"""The parity proof: `python -m proofs.parity [--world N] [--quick] [--strict]`.

Every way to split the model must compute the same as the unsharded model (reference.py). For every
layout of 1, 2, 4 and 8 ranks, it compares initial weights, loss, gradient norm, every parameter's
gradient, and 7 optimizer steps, in float64 and in float32. Then it compares every schedule,
context parallelism with single sequences, and a covering array over layouts and options, in
float64; and every kind of layer, which must have a reference of its own (reference_KIND.py). Of
mixtures of experts it compares every layout with every ep of 1, 2 and 4, a covering array, and
loads as uneven as they can be, with the experts that each token chooses, the routers' losses, and
biases after 3 steps (chosen.py). With TRITON_INTERPRET=1 before the command (or on a GPU
machine), it also compares the model with Triton's kernels. It prints one line per case with the
largest relative errors, and exits with status 1 if any is out of bounds (`BOUNDS` in run.py). On
two cores, over gloo, all cases together take about 40 minutes.
"""

import contextlib
import functools
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from model.kernels.backend import why_not_triton
from proofs.parity import chosen
from proofs.parity.cases import Case, Covering, Pair, covering_cases, layouts_of, option_values
from proofs.parity.chosen import EXPERT_LAYOUTS, EXPERT_STEPS, expert_values
from proofs.parity.run import BOUNDS, Row, check, worst
from proofs.ranks import Ranks
from tools.command import CommandParser, at_least, check_json, run_command, write_json

WORLDS = (1, 2, 4, 8)


@functools.cache
def dense_covering(worlds: tuple[int, ...], quick: bool) -> Covering:
    return covering_cases({"layout": layouts_of(worlds, quick), **option_values()})


@functools.cache
def expert_covering(worlds: tuple[int, ...]) -> Covering:
    return covering_cases(expert_values([at for at in EXPERT_LAYOUTS if at.world in worlds]))


def plan(worlds: tuple[int, ...], quick: bool) -> tuple[list[tuple[Case, int]], list[Pair]]:
    """Return the cases, each with its number of optimizer steps, and the pairs of option values
    that no valid case contains."""
    dense, of_experts = dense_covering(worlds, quick), expert_covering(worlds)
    # those of AdamW are compared on every layout
    cases = [(case, 1 if case.optimizer == "adamw" else EXPERT_STEPS) for case in dense.cases]
    cases += [(case, EXPERT_STEPS) for case in of_experts.cases]
    cases += [(case, EXPERT_STEPS) for case in chosen.kind_cases() if case.world in worlds]
    if not quick:
        for sizes in layouts_of(worlds, quick):
            # Without a pipeline, two micro-batches are enough to show every error of accumulation.
            case = Case(sizes, num_microbatches=4 if sizes.pp > 1 else 2)
            # five steps of the learning rate's warmup, and of its decay two
            cases += [(replace(case, dtype=dtype), 7) for dtype in BOUNDS]
        dense_ones = chosen.schedule_cases(worlds) + chosen.context_cases()
        dense_ones += [] if why_not_triton("cpu") else chosen.kernel_cases()
        cases += [(case, 1) for case in dense_ones if case.world in worlds]
        with_experts = chosen.expert_layout_cases(worlds) + chosen.extreme_cases()
        cases += [(case, EXPERT_STEPS) for case in with_experts if case.world in worlds]
    return cases, dense.impossible + of_experts.impossible


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m proofs.parity", description=__doc__)
    parser.option("--world", int, "N", "only layouts of N ranks (default: 1, 2, 4 and 8)")
    few = "only the covering arrays over a few layouts, in minutes"
    parser.option("--quick", bool, None, few)
    strict = "over a process group that orders communication as strictly as NCCL (proofs/strict)"
    parser.option("--strict", bool, None, strict)
    parser.option("--jobs", 2, "N", "compare so many cases at a time")
    parser.option("--json", Path, "FILE", "write every row to FILE")
    options = parser.parse_args(arguments)
    at_least(1, world=options.world, jobs=options.jobs)
    check_json(options.json)
    worlds = (options.world,) if options.world else WORLDS
    started = time.monotonic()
    cases, impossible = plan(worlds, options.quick)
    print(f"{len(cases)} cases; {len(impossible)} pairs of options are incompatible", flush=True)
    # A case leaves cores idle while its ranks meet and part, so several run at a time.
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(options.jobs) as threads:
        pools = queue.SimpleQueue[Ranks]()
        for _ in range(options.jobs):
            pool = Ranks(max(worlds), backend="strict" if options.strict else "gloo")
            pools.put(stack.enter_context(pool))

        def compared(case_and_steps: tuple[Case, int]) -> Row:
            ranks = pools.get()
            try:
                row = check(ranks, *case_and_steps)
            finally:
                pools.put(ranks)
            print(row, flush=True)
            return row

        rows = list(threads.map(compared, cases))
    passed = [row for row in rows if not row.failures()]
    seconds = time.monotonic() - started
    for dtype, bounds in BOUNDS.items():
        if finished := [row for row in rows if row.case.dtype == dtype and not row.crash]:
            found = {name: worst(row.errors[name] for row in finished) for name in bounds}
            text = (f"{name} {value:.1e} (≤ {bounds[name]:.0e})" for name, value in found.items())
            print(f"{dtype} worst:", *text)
    print(f"{len(passed)} of {len(rows)} cases within bounds, {seconds:.0f} s")
    report = {
        "passed": len(passed) == len(rows),
        "seconds": seconds,
        "bounds": BOUNDS,
        "impossible_pairs": impossible,
        "rows": [row.as_json() for row in rows],
    }
    write_json(options.json, report, default=str)
    return 0 if rows and len(passed) == len(rows) else 1


if __name__ == "__main__":
    run_command(main)
