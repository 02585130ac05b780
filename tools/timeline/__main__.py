"""Shows when each rank of a pipeline runs which action, simulated from a schedule or measured in a
training run.

    python -m tools.timeline --schedule 1f1b --stages 4 --micro-batches 8    as text
    python -m tools.timeline --schedule 1f1b zb_v --stages 4 --micro-batches 8 --out both.svg
                                                                             both, on one time axis
    python -m tools.timeline --trace runs/laptop --out step.svg --simulated  measured and simulated

A step is measured with `run.trace=true`, which writes trace.json into the run's folder. --out
FILE.json writes a simulation in the same format, with a unit of time as a millisecond.
https://ui.perfetto.dev opens both.

In text, F0 is the forward of micro-batch 0 and B0 its backward, or I0 and W0 its input gradient and
its weight gradient where backward is split. Capital letters are a rank's first stage (third, …),
small letters its second (fourth, …).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from errors import UserError
from parallel.pipeline.schedules import MAX_FORWARDS, SCHEDULES
from runtime.profiling.chrome import to_chrome
from tools.command import CommandParser, run_command
from tools.timeline.draw import Panel, draw, save
from tools.timeline.panels import simulated_panels, traced_panels
from tools.timeline.text import print_panels

SUFFIXES = (".svg", ".png", ".json")


def write(panels: Sequence[Panel], unit: str, out: Path) -> None:
    if out.suffix not in SUFFIXES:
        why = "is neither the name of a picture nor of a trace"
        raise UserError("--out", str(out), why, f"end the name in {', '.join(SUFFIXES)}")
    if out.suffix == ".json" and len(panels) > 1:
        why = f"a trace holds one timeline, not {len(panels)}"
        raise UserError("--out", str(out), why, "write each schedule to a separate file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".json":
            out.write_text(
                json.dumps(to_chrome(panels[0].timeline), indent=1) + "\n", encoding="utf-8"
            )
        else:
            save(draw(panels, unit), out)
    except OSError as error:
        why = f"cannot be written ({error.strerror})"
        raise UserError("--out", str(out), why, "choose another path") from None


def parse_costs(text: str) -> tuple[float, float, float]:
    try:
        forward, input_grad, weight_grad = (float(cost) for cost in text.split(","))
    except ValueError:
        why = "is not three numbers"
        raise UserError("--costs", text, why, "give F,I,W, for example 1,1,1") from None
    if not (
        0 < forward < float("inf")
        and 0 <= input_grad < float("inf")
        and 0 <= weight_grad < float("inf")
    ):
        why = "F must be positive, I and W not negative"
        raise UserError("--costs", text, why, "give F,I,W, for example 1,1,1")
    return forward, input_grad, weight_grad


def panels_of(options: argparse.Namespace) -> list[Panel]:
    """The panels that the command line asks for."""
    if not 0 <= options.communication < float("inf"):
        why = "must be a time, 0 or more"
        raise UserError("--communication", options.communication, why, "give for example 0.2")
    if options.trace is not None:
        return traced_panels(options.trace, options.simulated, options.communication)
    if options.simulated:
        why = "belongs to --trace; a schedule is always simulated"
        raise UserError("--simulated", True, why, "leave it out")
    for name in options.schedule:
        if name not in SCHEDULES:
            why = "there is no such schedule"
            raise UserError("--schedule", name, why, f"choose from {', '.join(SCHEDULES)}")
    per_rank = options.stages_per_rank or []
    sizes = [("--stages", options.stages), ("--micro-batches", options.micro_batches)]
    sizes += [("--stages-per-rank", v) for v in per_rank]
    for key, size in sizes:
        if size is None or size < 1:
            why = "a schedule needs a positive number"
            raise UserError(key, size, why, f"give for example {key} 4")
    if len(per_rank) not in (0, 1, len(options.schedule)):
        why = f"there are {len(options.schedule)} schedules"
        remedy = "give one number for all schedules, or one for each"
        raise UserError("--stages-per-rank", per_rank, why, remedy)
    if len(per_rank) == 1:
        per_rank = per_rank * len(options.schedule)
    ranks, microbatches = options.stages, options.micro_batches
    # some schedules are first built for 2 micro-batches a rank
    forwards = ranks * max(per_rank, default=1) * max(2 * ranks, microbatches)
    if forwards > MAX_FORWARDS:
        key, size = max(sizes, key=lambda one: one[1])
        why = f"there would be up to {forwards:,} forwards: too many"
        raise UserError(key, size, why, "use smaller numbers")
    costs = parse_costs(options.costs)
    return simulated_panels(
        options.schedule,
        options.stages,
        options.micro_batches,
        per_rank,
        costs,
        options.communication,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.timeline", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--schedule", nargs="+", metavar="NAME", help=f"one or more of {', '.join(SCHEDULES)}"
    )
    source.add_argument(
        "--trace",
        type=Path,
        metavar="RUN",
        help="a measured step: a run's folder, or a trace.json (its first pipeline)",
    )
    parser.add_argument(
        "--stages", type=int, metavar="P", help="ranks of the pipeline, each with V stages"
    )
    parser.add_argument("--micro-batches", type=int, metavar="M", help="micro-batches per step")
    per_rank = (
        "stages per rank: one number, or one per schedule (default: 1 if the schedule allows it, "
        "else 2)"
    )
    parser.add_argument("--stages-per-rank", type=int, nargs="+", metavar="V", help=per_rank)
    costs = (
        "time of a stage's forward, input gradient and weight gradient (default: %(default)s); "
        "an unsplit backward takes I + W. "
        "If schedules with different V are compared, these are the times of a stage at the largest "
        "V; with fewer stages per rank, each stage takes longer"
    )
    parser.add_argument("--costs", default="1,1,1", metavar="F,I,W", help=costs)
    message = "time of a message between ranks (default: %(default)s)"
    parser.add_argument("--communication", type=float, default=0.0, metavar="C", help=message)
    parser.add_argument(
        "--simulated",
        action="store_true",
        help="with --trace: also show a simulation of the same actions, below the measured step",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write a picture (.svg, .png) or a trace (.json); without --out, print text",
    )
    options = parser.parse_args(arguments)
    unit = "" if options.trace is None else "ms"
    try:
        panels = panels_of(options)
        if options.out is None:
            print_panels(panels, unit)
        else:
            write(panels, unit, options.out)
            print(
                "\n".join(f"{panel.title}\n  {panel.caption}" for panel in panels)
                + f"\nwrote {options.out}"
            )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_command(main)
