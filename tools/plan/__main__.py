"""Predicts memory, traffic, time and MFU of a run for every pipeline rank, without a GPU.

    python -m tools.plan configs/llama3_70b.yaml                            on 256 H100 GPUs
    python -m tools.plan configs/llama3_70b.yaml parallel.dp_shard=4 --device h200
    python -m tools.plan configs/llama3_405b.yaml --gpus 16384 --search     the fastest that fits
    python -m tools.plan configs/llama3_8b.yaml --tokens 15e12 --price 2.5  days, energy and cost
    python -m tools.plan configs/llama3_8b.yaml --guide 4                   ZeRO as guides count it

Without --gpus, the number of GPUs is the product of the axes, or is read from the file's first line
(`# world: 256`). 1 GB is 1e9 bytes.
docs/planning.md explains how the figures are computed; docs/plan_accuracy.md compares them with
rehearsals and published results.
"""

import argparse
from pathlib import Path

from costs.routing import check_imbalance
from errors import UserError
from settings.checks import validate
from settings.config import Config
from settings.layouts import valid_layout
from settings.load import load_config
from tools.command import CommandParser, at_least, reports_errors, run_command, write_json
from tools.plan.guide import zero_table
from tools.plan.hardware import DEVICES, find_device
from tools.plan.layout import check_gpus, world_of
from tools.plan.memory import one_stage
from tools.plan.search import describe_search, search
from tools.plan.summary import describe_plan, summarise

MODES = {  # the options that each reads, apart from config and overrides
    "guide": (),
    "search": ("gpus", "device", "data_stage", "tokens", "price", "json"),
}


@reports_errors
def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(prog="python -m tools.plan", description=__doc__)
    add = parser.option
    parser.configuration("CONFIG", "a configuration file")
    add("--gpus", int, "N", "number of GPUs (default: as described above)")
    add("--data-stage", int, "K", "number of a data stage (default: the one with the highest peak)")
    add("--device", "h100", "NAME", f"{', '.join(DEVICES)}, or a JSON file of rates")
    add("--search", bool, None, "search all layouts, whatever CONFIG has")
    add("--imbalance", 1.0, "F", "the slowest rank's experts receive F times their share of rows")
    add("--guide", int, "N", "ZeRO's memory and traffic as guides count them")
    add("--tokens", 0.0, "T", "tokens of the run, or of the data stage")
    add("--price", 0.0, "P", "price of one GPU for one hour")
    add("--json", Path, "FILE", "write all figures to FILE")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(options.config, options.overrides)
    check_options(parser, options, config)
    device = find_device(options.device)
    if options.guide is not None:
        check_gpus("--guide", options.guide)
        print(zero_table(config, options.guide))
        return
    world = world_of(options.config, config, options.gpus)
    if not options.search:
        config, world = valid_layout(config, world)
    config, which = one_stage(config, world, options.data_stage)
    if which and options.search and options.data_stage:
        which += f"; its overrides need data_stages.{options.data_stage}. before each key"
    if which:
        print(which)
    searched = search(config, world, device) if options.search else None
    if searched is not None:
        print(describe_search(searched) + "\n")
        config = searched.best[0].config
        validate(config, world)
    check_imbalance("--imbalance", options.imbalance, config.model, config.parallel.ep)
    plan = summarise(config, world, device, options.tokens, options.price, options.imbalance)
    print(describe_plan(plan))
    if searched is not None:
        plan["search"] = searched.as_dict()
    write_json(options.json, plan)


def check_options(parser: CommandParser, options: argparse.Namespace, config: Config) -> None:
    """Raise UserError for options that would not be read, or are missing."""
    for mode, reads in MODES.items():
        for name, value in vars(options).items() if getattr(options, mode) else ():
            known = name in ("config", "overrides", mode, *reads)
            if not known and value != parser.get_default(name):
                option, told = f"--{name.replace('_', '-')}", getattr(value, "name", value)
                raise UserError(option, told, f"--{mode} does not read it", "leave it out")
    at_least(0, tokens=options.tokens, price=options.price)
    of_one = {
        "a search": options.search,
        "so uneven a load": options.imbalance > 1,
        "the time of so many tokens": options.tokens,
    }
    what = next((what for what, is_given in of_one.items() if is_given), "")
    if what and config.data_stages and options.data_stage is None:
        why = f"{what} is for one data stage, and each may have a layout of its own"
        raise UserError("--data-stage", None, why, f"give 0 to {len(config.data_stages)}")


if __name__ == "__main__":
    run_command(main)
