"""Refuses configurations that cannot be planned, and lists the assumptions of a plan."""

from dataclasses import replace

from errors import UserError
from parallel.axes import MAX_RANKS
from tools.plan.hardware import Device
from training.config import Config


def check_gpus(key: str, number: int) -> None:
    """Raises UserError."""
    if not 1 <= number <= MAX_RANKS:
        why = f"must be at least 1 and at most {MAX_RANKS:,}"
        raise UserError(key, number, why, "give a number of GPUs")


def check_can_be_planned(config: Config) -> None:
    """Raise UserError if the configuration uses a feature that the planner does not model.
    tools/rehearse, whose GPU is a fake one, cannot show it either."""
    if config.parallel.cpu_offload:
        why = "moves weights and optimizer state between host and GPU, which a plan does not model"
        raise UserError("parallel.cpu_offload", True, why, "set parallel.cpu_offload=false")


def check_before_search(config: Config) -> None:
    """Raise UserError for what is wrong in every layout."""
    check_can_be_planned(config)
    # Settings that are wrong only in some layouts are replaced by ones that are valid on one rank.
    # The micro-batch size, which this replaces too, is checked below.
    parallel = replace(config.parallel, tp=1, pp=1, cp=1, ep=1, dp_shard=1, dp_replicate=1,
                       schedule="1f1b", stages_per_rank=1, layers_per_stage=None,
                       zero_stage=2)  # fmt: skip
    alone = replace(config, parallel=parallel, train=replace(config.train, micro_batch_size=1),
                    run=replace(config.run, profile_ranks=[0]))  # fmt: skip
    alone.validate(1)
    size = config.train.micro_batch_size
    if size < 1:
        raise UserError("train.micro_batch_size", size, "must be at least 1", "give 1 or more")


def assumptions(config: Config, device: Device) -> list[str]:
    """The respects in which the planned figures may differ from the run, as lines of text."""
    lines = []
    if config.train.compile:
        lines.append(
            "planned without train.compile=true, which makes a step a little faster and keeps a "
            "little less memory"
        )
    if device.name != device.efficiencies_of:
        lines.append(
            f"efficiencies are those of {device.efficiencies_of}, except those that a file of "
            "rates replaces"
        )
    return lines
