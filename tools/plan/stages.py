"""Which stage of a run with stages (training/stages.py) a tool looks at: one stage's layout is
planned and rehearsed at a time."""

import argparse

from errors import UserError
from tools.plan.layout import Layout
from tools.plan.peaks import peaks
from training.config import Config


def add_data_stage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-stage",
        type=int,
        metavar="K",
        help="the stage of a configuration with `stages` (default: the one with the highest peak)",
    )


def one_stage(config: Config, world: int, number: int | None) -> tuple[Config, str]:
    """The configuration of stage `number`, or of the stage that needs the most memory on some rank;
    and a line that says which, empty for a configuration without stages. Raises UserError."""
    stages = config.each_stage
    last = len(stages) - 1
    if number is not None and not 0 <= number <= last:
        why = f"the configuration has the stages 0 to {last}"
        raise UserError("--data-stage", number, why, "choose one of them")
    if not last:
        return config, ""
    if number is not None:
        return stages[number].alone, f"stage {number} of 0 to {last}"
    config.validate(world)
    most = [max(peaks(Layout(stage.alone, world, 0))) for stage in stages]
    number = most.index(max(most))
    each = ", ".join(f"{peak / 1e9:.2f}" for peak in most)
    return stages[number].alone, f"stage {number} of 0 to {last}, whose peaks are {each} GB"
