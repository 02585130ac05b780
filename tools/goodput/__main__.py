"""How often to save, how many spare nodes to keep, and how much of the time is then effective.

    python -m tools.goodput --gpus 16384 --save 2 --commit 60 --restart 900
    python -m tools.goodput --gpus 1024 --run runs/mine     what saves and restarts took in a run

For several intervals between saves, around the best one by Young's √(2sM), it prints the effective
training time (ETTR) in a simulation of --days and by the closed form
(runtime/checkpoints/goodput.py), and how many nodes must be spare. docs/goodput.md explains the
numbers. --save is how long training waits for a save, --commit how long after its beginning a save
counts, --restart how long it takes from a failure until the steps go on.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from errors import UserError
from hardware import FAILURES_PER_GPU_DAY, H100, NODE_LOST_SHARE
from parallel.axes import MAX_RANKS
from runtime.checkpoints.goodput import DAY, best_interval, shares, spares_needed
from tools.command import CommandParser, run_command
from tools.goodput.simulate import Job, simulate
from tools.report.ledger import events_of, measure

AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the best interval
MOST_EVENTS = 500_000  # failures and planned stops in a simulation, which takes a second
PARTS = ("saving", "repeated", "restarting", "waiting", "slower")


def job_of(options: argparse.Namespace) -> Job:
    """The job that the options describe; without an interval."""
    found = measure(events_of(options.run, "--run")) if options.run is not None else None
    gpus = options.gpus or (found.world_size if found else 0)
    if gpus < 1:
        raise UserError("--gpus", gpus, "the size of the job is not known", "give --gpus or --run")
    if gpus > MAX_RANKS:
        raise UserError("--gpus", gpus, f"must be at most {MAX_RANKS:,}", "give fewer")
    if options.gpus_per_node < 1:
        why = "a node has at least one GPU"
        raise UserError("--gpus-per-node", options.gpus_per_node, why, "give 1 or more")
    per_node = min(options.gpus_per_node, gpus)
    if gpus % per_node:
        why = f"is not a multiple of {per_node}"
        raise UserError("--gpus", gpus, why, "give whole nodes, or --gpus-per-node")
    save = options.save if options.save is not None else (found and found.save)
    if save is None:
        why = "what a save costs is not known" + (": the run saved nothing" if found else "")
        raise UserError("--save", "", why, "give --save, or the --run of a run that saved")
    measured_commit = save + found.commit if found and found.commit is not None else save
    commit = options.commit if options.commit is not None else measured_commit
    restart = options.restart if options.restart is not None else (found and found.restart)
    for name in ("lemons", "spares"):
        if getattr(options, name) < 0:
            raise UserError(f"--{name}", getattr(options, name), "is negative", "give 0 or more")
    if options.lemons > gpus // per_node:
        raise UserError("--lemons", options.lemons, "there are fewer nodes", "give fewer")
    job = Job(
        nodes=gpus // per_node,
        failures_per_node_day=options.failures_per_gpu_day * per_node,
        save=save,
        commit=max(save, commit),
        restart=H100.restart_seconds if restart is None else restart,
        stops_per_day=options.stops_per_day,
        node_lost_share=NODE_LOST_SHARE if options.repair_days else 0.0,
        repair_days=options.repair_days,
        spares=options.spares,
        shrinks=options.shrink,
        lemons=options.lemons,
        lemon_factor=options.lemon_factor,
    )
    events = options.days * (DAY / job.mtbf + job.stops_per_day)
    if events > MOST_EVENTS:
        why = f"{events:,.0f} failures and stops would be simulated: too many"
        raise UserError("--days", options.days, why, "give fewer days")
    if lost_nodes(job) > job.nodes:
        why = f"on average, {lost_nodes(job):,.0f} of {job.nodes:,} nodes would be under repair"
        raise UserError("--repair-days", options.repair_days, why, "give fewer days")
    return job


def lost_nodes(job: Job) -> float:
    """How many nodes are under repair on average."""
    return DAY / job.mtbf * job.node_lost_share * job.repair_days


def table(job: Job, intervals: list[float], days: float, seed: int) -> list[dict[str, Any]]:
    """One row of figures per interval, each in seconds."""
    rows = []
    for interval in intervals:
        one = replace(job, interval=interval)
        account = simulate(one, days * DAY, seed)
        rows.append(
            {
                "interval_seconds": interval,
                "effective": account.effective,
                "closed_form": shares(one.costs, interval).effective,
                "failures": account.failures,
                "shares": account.shares(),
            }
        )
    return rows


def describe(job: Job, rows: list[dict[str, Any]], days: float) -> str:
    lines = [
        f"{job.nodes:,} nodes, a failure after {_time(job.mtbf)} (M); a save costs "
        f"{_time(job.save)} (s) and counts after {_time(job.commit)}; a restart takes "
        f"{_time(job.restart)}",
        f"simulated for {days:,.0f} days; the shares of the time:",
        "  interval  effective  closed form " + "".join(f"{part:>12}" for part in PARTS),
    ]
    best = best_interval(job.save, job.mtbf)
    for row in rows:
        parts = "".join(f"{row['shares'][part]:>12.2%}" for part in PARTS)
        mark = "  √(2sM)" if row["interval_seconds"] == best else ""
        lines.append(
            f"{_time(row['interval_seconds']):>10}{row['effective']:>11.2%}"
            f"{row['closed_form']:>13.2%} {parts}{mark}"
        )
    if job.node_lost_share:
        lines.append(
            f"spare nodes: {spares_needed(lost_nodes(job))} suffice 99% of the time, if a lost "
            f"node is repaired in {job.repair_days * 24:g} h; simulated with {job.spares}"
        )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def positive(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1e12:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 to 1e12")
    return number


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.goodput", description=__doc__)
    add = parser.add_argument
    add("--run", type=Path, metavar="RUN", help="take what is not given from this run folder")
    add("--gpus", type=int, metavar="N", help="of the job (default: those of --run)")
    add("--gpus-per-node", type=int, default=H100.gpus_per_node, metavar="N")
    add("--save", type=positive, metavar="S", help="seconds that training waits for a save")
    add("--commit", type=positive, metavar="S", help="seconds until a save counts")
    add("--restart", type=positive, metavar="S", help="seconds from a failure to the next step")
    add("--interval", type=positive, metavar="S", help="seconds of training between saves")
    add(
        "--failures-per-gpu-day",
        type=positive,
        default=FAILURES_PER_GPU_DAY,
        metavar="X",
        help="default: Llama 3's (hardware.py)",
    )
    add("--spares", type=int, default=0, metavar="N", help="spare nodes in the simulation")
    add(
        "--repair-days",
        type=positive,
        default=0.0,
        metavar="D",
        help="how long a lost node is missing; 0, the default: no node is lost",
    )
    add("--shrink", action="store_true", help="train on fewer nodes, instead of waiting for one")
    add("--lemons", type=int, default=0, metavar="N", help="nodes that fail more often")
    add("--lemon-factor", type=positive, default=10.0, metavar="X", help="how much more often")
    add("--stops-per-day", type=positive, default=0.0, metavar="X", help="planned stops")
    add("--days", type=positive, default=1000.0, metavar="D", help="length of the simulation")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args(arguments)
    try:
        job = job_of(options)
        best = best_interval(job.save, job.mtbf)
        if options.interval == 0:
            raise UserError("--interval", 0, "there is no training between saves", "give more")
        if options.interval is None and not 0 < best < math.inf:
            why = "nothing fails, or a save costs nothing, so there is no best one"
            raise UserError("--interval", "", why, "give one")
        intervals = (
            [best * factor for factor in AROUND] if options.interval is None else [options.interval]
        )
        rows = table(job, intervals, options.days, options.seed)
        print(describe(job, rows, options.days))
        if options.json is not None:
            mtbf = job.mtbf if math.isfinite(job.mtbf) else None  # JSON has no infinity
            figures = {"job": asdict(job), "mtbf_seconds": mtbf, "intervals": rows}
            try:
                options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                why = f"it cannot be written ({error.strerror})"
                remedy = "give a file where you may write"
                raise UserError("--json", str(options.json), why, remedy) from None
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_command(main)
