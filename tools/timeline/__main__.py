"""Shows when each rank of a pipeline runs which action, simulated from a schedule or measured in a
training run.

    python -m tools.timeline --schedule 1f1b --stages 4 --micro-batches 8    as text
    python -m tools.timeline --schedule 1f1b zb_v --stages 4 --micro-batches 8 --out both.svg
                                                                             both, on one time axis
    python -m tools.timeline --trace runs/laptop --out step.svg              a measured step

A step is measured with `run.trace=true`, which writes trace.json into the run's folder;
https://ui.perfetto.dev opens it, too.

In text, F0 is the forward of micro-batch 0 and B0 its backward, or I0 and W0 its input gradient and
its weight gradient where backward is split. Capital letters are a rank's first stage (third, …),
small letters its second (fourth, …).
"""

import argparse
import math
from pathlib import Path
from typing import Any

from parallel.pipeline.schedules import SCHEDULES
from tools.command import CommandParser, at_least, reports_errors, run_command, writes
from tools.timeline.draw import draw, save
from tools.timeline.panels import print_panels, simulated_panels, traced_panel


def time(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time, 0 or more")
    return float(text)


def costs(text: str) -> tuple[float, ...]:
    times = tuple(map(time, text.split(",")))
    if len(times) != 3 or not times[0]:
        why = f"{text!r} is not F,I,W, three times of which F is not 0, for example 1,1,1"
        raise argparse.ArgumentTypeError(why)
    return times


@reports_errors
def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(prog="python -m tools.timeline", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    names = f"one or more of {', '.join(SCHEDULES)}"
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    source.add_argument("--schedule", choices=SCHEDULES, metavar="NAME", help=names, **several)
    trace = "a measured step: a run's folder, or a trace.json (its first pipeline)"
    source.add_argument("--trace", type=Path, metavar="RUN", help=trace)
    parser.option("--stages", int, "P", "with --schedule: ranks of the pipeline")
    parser.option("--micro-batches", int, "M", "with --schedule: per step")
    per_rank = "one number, or one per schedule (default: 1 if the schedule allows it, else 2)"
    parser.option("--stages-per-rank", int, "V", per_rank, nargs="+", default=[])
    times = (
        "time of a stage's forward, input gradient and weight gradient (default: 1,1,1); "
        "an unsplit backward takes I + W. If V differs, these are the times of a stage at the "
        "largest V; with fewer stages per rank, each stage takes longer"
    )
    parser.add_argument("--costs", type=costs, default=(1, 1, 1), metavar="F,I,W", help=times)
    message = "simulated time of a message between ranks (default: %(default)s)"
    parser.add_argument("--communication", type=time, default=0.0, metavar="C", help=message)
    parser.option("--out", Path, "FILE", "write a picture (.svg, .png) in place of text")
    options = parser.parse_args(arguments)
    out, schedules, per_rank = options.out, options.schedule, options.stages_per_rank
    if out is not None and out.suffix not in (".svg", ".png"):
        parser.error(f"--out: {str(out)!r} is no picture: end it in .svg or .png")
    if schedules is None:
        given = {"--stages": options.stages, "--micro-batches": options.micro_batches,
                 "--stages-per-rank": per_rank, "--costs": options.costs != (1, 1, 1),
                 "--communication": options.communication}  # fmt: skip
        if unread := [name for name, value in given.items() if value]:
            parser.error(f"{unread[0]}: --trace does not read it")
        panels = [traced_panel(options.trace)]
    else:
        sizes = {"stages": options.stages, "micro_batches": options.micro_batches}
        if None in sizes.values():
            parser.error("--schedule needs --stages and --micro-batches")
        at_least(1, **sizes, stages_per_rank=min(per_rank, default=None))
        if len(per_rank) not in (0, 1, len(schedules)):
            why = f"has {len(per_rank)} numbers for {len(schedules)} schedules"
            parser.error(f"--stages-per-rank {why}")
        given = *sizes.values(), per_rank, options.costs, options.communication
        panels = simulated_panels(schedules, *given)
    unit = "ms" if schedules is None else ""
    if out is None:
        print_panels(panels, unit)
        return
    with writes("--out", out):
        save(draw(panels, unit), out)
    print(*(f"{panel.title}\n  {panel.caption}" for panel in panels), f"wrote {out}", sep="\n")


if __name__ == "__main__":
    run_command(main)
