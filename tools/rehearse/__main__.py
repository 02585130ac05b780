"""Runs one rank of a job of any size, on a fake GPU.

    python -m tools.rehearse configs/llama3_70b.yaml --rank 64     a rank's memory and collectives
    python -m tools.rehearse configs/llama3_8b.yaml --operators    every operator, and its line
    python -m tools.rehearse configs/laptop.yaml --rank 4 --races  its streams and threads

It runs one whole step of the training code itself: the model, the pipeline's runner, FSDP2 and the
optimizer. Nothing is computed: tensors have shapes but no data (fake_gpu.py). The other ranks are
fake: collectives return at once, and experts receive equal numbers of rows. Memory is counted for a
GPU with Triton's kernels and flash attention, and compared with the plan that tools/plan makes for
the rank. The number of ranks is that of --gpus, of the configuration's axes, or of its first line
(`# world: N`).

With --races memory is not counted. It looks for accesses to memory that no wait orders, memory that
is freed while a stream uses it, waits of the host inside a step, and threads on a wrong device, in
two steps with a save after each. The exit status is 1 if there is any of these. It also shows what
hides each collective, with times from the data sheet of --device.
"""

from functools import partial
from pathlib import Path
from typing import Any

from settings.config import Config
from settings.layouts import valid_layout
from settings.load import load_config
from tools.command import (
    CommandParser,
    at_least,
    check_json,
    reports_errors,
    run_command,
    write_json,
)
from tools.plan.hardware import GB, find_device
from tools.plan.layout import Layout, world_of
from tools.plan.memory import Memory, one_stage
from tools.plan.traffic import by_axis, over_groups
from tools.rehearse.operators import describe_operators, recording
from tools.rehearse.races import checking, describe_races
from tools.rehearse.rank import alone, check_can_be_rehearsed, rehearse, title


def beside_the_plan(config: Config, report: dict[str, Any]) -> dict[str, Any]:
    """Compare the report with the plan that tools/plan makes for the same rank."""
    layout = Layout.of_rank(config, report["world"], report["rank"])
    peak = Memory(layout).peak
    return {
        "peak_memory_bytes": peak,
        "error": peak / report["peak_memory_bytes"] - 1,
        "same_collectives": by_axis(over_groups(layout)) == report["collectives"],
    }


def describe(report: dict[str, Any]) -> str:
    peak = f"{report['peak_memory_bytes'] / GB:.2f} GB in {report['peak_in']}"
    lines = [f"{title(report)}: at the peak {peak}"]
    for axis, row in report["collectives"].items():
        kinds = ", ".join(f"{kind} {part['count']:,}" for kind, part in row["kinds"].items())
        lines.append(
            f"  {row['bytes'] / GB:9.3f} GB  over {axis} in {row['count']:,} collectives: {kinds}"
        )
    plan = report["planned"]
    agree = "the same collectives" if plan["same_collectives"] else "OTHER COLLECTIVES"
    planned = plan["peak_memory_bytes"] / GB
    lines.append(f"  planned {planned:.3f} GB, {abs(plan['error']):.1%} off; {agree}")
    host = f"{report['host_bytes'] / 2**30:.2f} GiB of host memory"
    lines.append(f"  rehearsed in {report['seconds']:.1f} s, with {host}")
    return "\n".join(lines)


@reports_errors
def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.rehearse", description=__doc__)
    parser.configuration("CONFIG", "a configuration file")
    parser.option("--rank", 0, "R", "the rank to run")
    parser.option("--gpus", int, "N", "number of ranks")
    which = "number of a data stage (default: the one with the highest peak)"
    parser.option("--data-stage", int, "K", which)
    instead = parser.add_mutually_exclusive_group()
    for name, text in {
        "--operators": "show every operator of a step with the line that causes it, and only that",
        "--races": "check what waits for what, and show what hides each collective",
    }.items():
        instead.add_argument(name, action="store_true", help=text)
    parser.option("--device", "h100", "NAME", "with --races: the device whose links are modelled")
    parser.option("--json", Path, "FILE", "write the results to FILE")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(options.config, options.overrides)
    config, world = valid_layout(config, world_of(options.config, config, options.gpus))
    config, which_stage = one_stage(config, world, options.data_stage)
    if which_stage:
        print(which_stage)
    device = find_device(options.device)
    at_least(0, world, rank=options.rank)
    check_can_be_rehearsed(config, options.races)
    check_json(options.json)
    run = partial(alone, rehearse, config, world, options.rank)
    if options.operators:
        report = run(2, recording)
        print(describe_operators(report))
    elif options.races:
        report = run(2, partial(checking, rates=device))
        print(describe_races(report, device))
    else:
        report = run(1)
        report["planned"] = beside_the_plan(config, report)
        print(describe(report))
    write_json(options.json, report)
    return int(bool(report.get("findings")))


if __name__ == "__main__":
    run_command(main)
