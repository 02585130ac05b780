"""Which job a tool looks at: one data stage of a run (settings/data_stages.py) at a time."""

from errors import UserError
from settings.config import Config
from settings.data_stages import data_stages
from tools.command import CommandParser
from tools.plan.layout import Layout
from tools.plan.memory import peaks


def add_data_stage(parser: CommandParser) -> None:
    which = "number of a data stage (default: the one with the highest peak)"
    parser.option("--data-stage", int, "K", which)


def one_stage(config: Config, world: int, number: int | None) -> tuple[Config, str]:
    """The configuration of data stage `number`, or of the one that needs the most memory on some
    rank; and a line that says which, empty for a run of only one. Raises UserError."""
    stages = [stage.config for stage in data_stages(config)]
    last = len(stages) - 1
    if number is not None and not 0 <= number <= last:
        why = f"the configuration has the data stages 0 to {last}"
        raise UserError("--data-stage", number, why, "choose one of them")
    if not last:
        return config, ""
    if number is not None:
        return stages[number], f"data stage {number} of 0 to {last}"
    most = [max(peaks(Layout(stage, world, 0))) for stage in stages]
    number = most.index(max(most))
    each = ", ".join(f"{peak / 1e9:.2f}" for peak in most)
    return stages[number], f"data stage {number} of 0 to {last}, whose peaks are {each} GB"
