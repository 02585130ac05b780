"""Predicts memory, traffic, time and MFU of a run for every pipeline rank, without a GPU.

    python -m tools.plan configs/llama3_70b.yaml                            on 256 H100 GPUs
    python -m tools.plan configs/llama3_70b.yaml parallel.dp_shard=4 --device h200
    python -m tools.plan configs/llama3_405b.yaml --gpus 16384 --search     the fastest that fits
    python -m tools.plan configs/llama3_8b.yaml --tokens 15e12 --price 2.5  days, energy and cost
    python -m tools.plan configs/llama3_8b.yaml --guide 4                   ZeRO as guides count it
    python -m tools.plan RUN/config.yaml --beside RUN/memory/step-….json    a rank's memory report

Without --gpus, the number of GPUs is the product of the axes, or is read from the file's first line
(`# world: 256`). --pictures FOLDER draws memory.svg, timeline.svg and, with --search, frontier.svg.
1 GB is 1e9 bytes. docs/plan_model.md explains how the figures are computed; docs/plan_accuracy.md
compares them with rehearsals and published results.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from errors import UserError
from parallel.axes import MeshSizes
from parallel.memory import ACTIVATIONS
from tools.command import CommandParser, add_overrides, run_command
from tools.plan.beside import beside, read_report
from tools.plan.check import check_can_be_planned, check_gpus
from tools.plan.draw import draw_frontier, draw_memory
from tools.plan.goodput import describe_goodput
from tools.plan.guide import zero_table
from tools.plan.hardware import DEVICES, GB, find_device
from tools.plan.layout import Layout, world_of
from tools.plan.node_counts import describe_layouts
from tools.plan.search import ALIKE, Found, Result, rows, search, why_not
from tools.plan.search import describe as describe_row
from tools.plan.stages import add_data_stage, one_stage
from tools.plan.summary import summarise
from tools.plan.time import StepTime
from tools.timeline.draw import Panel, draw, save
from tools.timeline.panels import figures
from training.layouts import valid_layout
from training.load_config import load_config


def describe(plan: dict[str, Any]) -> str:
    mesh = str(MeshSizes(**plan["mesh"]))
    lines = [
        f"{plan['parameters']:,} parameters on {plan['world']} × {plan['device']} = {mesh}, "
        f"{plan['micro_batches']} micro-batches each",
        f"step {plan['step_seconds']:.3f} s   {plan['tokens_per_second']:,.0f} tokens/s   "
        f"{plan['tokens_per_second_per_device']:,.0f} per GPU   bubble "
        f"{plan['bubble_fraction']:.1%}",
        f"MFU {plan['mfu']:.1%} = {plan['mfu_formula']} ({plan['peak_flops'] / 1e12:,.0f} TFLOP/s)",
        f"    {plan['mfu_full_attention']:.1%} with attention counted as the whole square",
        f"energy {plan['joules_per_step'] / 1e6:,.2f} MJ a step"
        + (f"   cost {plan['cost_per_step']:,.2f} a step" if "cost_per_step" in plan else ""),
    ]
    if run := plan.get("run"):
        cost = f"   cost {run['cost']:,.0f}" if "cost" in run else ""
        lines.append(
            f"{run['tokens']:.3g} tokens: {run['days']:,.1f} days   {run['megawatt_hours']:,.0f} "
            f"MWh{cost}"
        )
    lines += describe_goodput(plan["goodput"]) + plan["assumptions"] + plan["warnings"]
    fits = "fits" if plan["fits"] else "DOES NOT FIT"
    lines.append(
        f"memory {max(plan['peak_memory_bytes']) / GB:.2f} GB at most: "
        f"{fits} {plan['memory_bytes_available'] / GB:.0f} GB"
    )
    for rank in plan["ranks"]:
        stages = ", ".join(map(str, rank["stages"]))
        lines.append(
            f"\npipeline rank {rank['pp_rank']}, stage {stages}: {rank['blocks']} blocks, "
            f"{rank['parameters']:,} parameters, "
            f"{rank['flops_per_step'] / 1e15:.2f} PFLOP a step"
        )
        live = f", {rank['live_micro_batches']} micro-batches of a stage alive at most"
        lines.append(
            f"  {rank['peak_memory_bytes'] / GB:9.3f} GB  at the peak, in {rank['peak_in']}{live}"
        )
        for name, size in rank["memory"].items():
            if size >= 1e6:
                lines.append(f"  {size / GB:9.3f} GB  {name}")
                kinds = rank["activations"] if name == ACTIVATIONS else {}
                lines += [
                    f"  {part / GB:15.3f} GB  {kind}" for kind, part in kinds.items() if part >= 1e6
                ]
        for axis, row in rank["collectives"].items():
            lines.append(
                f"  {row['bytes'] / GB:9.3f} GB  over {axis} in {row['count']:,} collectives, "
                f"{row['wire_bytes'] / GB:.3f} GB on the wire{_seconds(row)}; {row['hidden']}"
            )
    return "\n".join(lines)


def _seconds(row: dict[str, Any]) -> str:
    if "wire_seconds" not in row:
        return ""
    return f" in {row['wire_seconds']:.3f} s, {row['exposed_seconds']:.3f} s of them exposed"


def describe_search(result: Result) -> str:
    found = rows([*result.best, *result.also])[: len(result.best)]
    lines = [
        f"{result.layouts:,} layouts, of which {result.counted:,} were counted exactly; "
        "the fastest that fit, fastest first, with layouts that "
        f"differ by less than {ALIKE:.0%} of a step in one row:",
        "            step s           MFU      peak GB",
    ]
    for i, row in enumerate(found):
        seconds = _range([one.seconds for one in row], 3)
        mfu = _range([one.time.mfu * 100 for one in row], 1) + "%"
        size = _range([one.peak / GB for one in row], 2)
        number = f"  ({len(row)} layouts)" if len(row) > 1 else ""
        lines.append(
            f"{i + 1:2d} {seconds:>15}  {mfu:>10}  {size:>11}  {describe_row(row)}{number}"
        )
    if len(found) > 1:
        lines.append(f"the second loses {why_not(found[0][0], found[1][0])}")
    lines.append(f"the first: {found[0][0].overrides()}")
    return "\n".join(lines + result.space)


def _range(numbers: list[float], digits: int) -> str:
    """The smallest and the largest number as `14.707-14.735`, or one number if they print alike."""
    ends = dict.fromkeys(f"{number:.{digits}f}" for number in (min(numbers), max(numbers)))
    return "-".join(ends)


def found_as_dict(one: Found) -> dict[str, Any]:
    return {
        "overrides": one.overrides(),
        "step_seconds": one.seconds,
        "mfu": one.time.mfu,
        "bubble_fraction": one.bubble_fraction,
        "peak_memory_bytes": one.peak,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.plan", description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="a configuration file")
    add_overrides(parser)
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs (default: the product of the axes, or the file's first line)",
    )
    add_data_stage(parser)
    parser.add_argument(
        "--device",
        default="h100",
        metavar="NAME",
        help=f"{', '.join(DEVICES)}, or a JSON file of rates",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="search all layouts; the configuration's own layout is ignored",
    )
    parser.add_argument(
        "--layouts",
        type=int,
        metavar="MIN",
        help="with --search: the list parallel.layouts for MIN to --gpus GPUs, in whole nodes of 8",
    )
    parser.add_argument(
        "--guide",
        type=int,
        metavar="N",
        help="print ZeRO's memory and traffic on N GPUs as guides count them",
    )
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="FILE",
        help="print a rank's memory report (RUN/memory/*.json) next to its plan",
    )
    parser.add_argument("--tokens", type=float, default=0.0, metavar="T", help="tokens of the run")
    parser.add_argument(
        "--price", type=float, default=0.0, metavar="P", help="price of one GPU for one hour"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw pictures in FOLDER")
    options = parser.parse_intermixed_args(arguments)
    try:
        print_plan(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def print_plan(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    for key, number in (("--tokens", options.tokens), ("--price", options.price)):
        if not 0 <= number < float("inf"):
            why = "must be a number, 0 or more"
            raise UserError(key, number, why, "omit the option if the number is unknown")
    device = find_device(options.device)
    if options.guide is not None:
        check_gpus("--guide", options.guide)
        print(zero_table(config, options.guide))
        return
    if options.beside is not None:
        print(beside(config, read_report(options.beside)))
        return
    world = world_of(options.config, config, options.gpus)
    if options.layouts is not None:
        print(describe_layouts(config, options.layouts, world, device))
        return
    if not options.search:
        config, world = valid_layout(config, world)
    config, which = one_stage(config, world, options.data_stage)
    if which:
        print(which)
    result: dict[str, Any] = {}
    frontier: list[Found] = []
    if options.search:
        searched = search(config, world, device)
        print(describe_search(searched) + "\n")
        result["search"] = {
            "layouts": searched.layouts,
            "counted": searched.counted,
            "space": searched.space,
            "best": [found_as_dict(one) for one in searched.best],
            "frontier": [found_as_dict(one) for one in searched.frontier],
        }
        config, frontier = searched.best[0].config, searched.frontier
        config.validate(world)
    check_can_be_planned(config)
    plan = summarise(config, world, device, options.tokens, options.price)
    print(describe(plan))
    result = plan | result
    try:
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if options.pictures is not None:
            save(draw_memory(plan), options.pictures / "memory.svg")
            timeline = StepTime(Layout(config, world, 0), device).timeline
            save(
                draw([Panel(config.parallel.schedule, timeline, figures(timeline, " s"))], "s"),
                options.pictures / "timeline.svg",
            )
            if frontier:
                save(
                    draw_frontier(frontier, plan["memory_bytes_available"]),
                    options.pictures / "frontier.svg",
                )
    except OSError as error:
        why = f"cannot be written ({error.strerror})"
        remedy = "choose another path"
        raise UserError("--json or --pictures", str(error.filename), why, remedy) from None


if __name__ == "__main__":
    run_command(main)
