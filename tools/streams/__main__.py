"""Checks the streams, memory and threads of a rank's step without a GPU, and shows what hides each
collective.

    python -m tools.streams configs/laptop.yaml --rank 4

The step is the real one (FSDP2, the pipeline's runner, the collectives, the optimizer), on a
pretended device that records what each stream waits for. Reported are accesses to memory that no
wait orders, memory that is freed while a stream uses it, waits of the host inside a step, and
threads on a wrong device. The exit status is 1 if there is any of these. The times are those of a
device's data sheet; nothing is measured.
"""

import sys
from typing import Any

from errors import UserError
from tools.command import CommandParser, add_overrides, run_command
from tools.plan.hardware import find_device
from tools.plan.layout import world_of
from tools.rehearse.__main__ import ranks_asked_for
from tools.rehearse.rank import alone, check_can_be_rehearsed
from tools.streams.step import check
from training.layouts import valid_layout
from training.load_config import load_config


def describe(report: dict[str, Any], device: str) -> str:
    stages = ", ".join(map(str, report["stages"]))
    found = report["findings"]
    lines = [
        f"rank {report['rank']} of {report['world']}, stage {stages}: {len(found)} findings in "
        f"{report['operators']:,} operators; {report['compared']:,} pairs of accesses compared",
        *(f"  {finding}" for finding in found),
        "",
        f"{'one step, with times on ' + device:32}  count         MB   bare  GFLOP beside"
        "      wire   exposed",
    ]
    for name, row in report["overlap"].items():
        wire, exposed = (1e3 * part for part in report["seconds"][name])
        lines.append(
            f"{name:32} {row['count']:6,} {row['bytes'] / 1e6:10,.3f} "
            f"{row['bare']:6,} {row['flops'] / 1e9:13,.3f} {wire:6.3f} ms {exposed:6.3f} ms"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.streams", description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="a configuration file")
    add_overrides(parser)
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the rank (default: 0)")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of ranks")
    parser.add_argument(
        "--device", default="h100", metavar="NAME", help="whose rates give times (default: h100)"
    )
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        config, world = valid_layout(config, world_of(options.config, config, options.gpus))
        (rank,) = ranks_asked_for(config, world, options.rank)
        check_can_be_rehearsed(config)
        device = find_device(options.device)
        report = alone(check, config, world, rank, device)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe(report, device.name))
    return int(bool(report["findings"]))


if __name__ == "__main__":
    run_command(main)
