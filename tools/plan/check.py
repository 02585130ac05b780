"""What a plan cannot say anything about, and what it takes for granted."""

from dataclasses import replace

from errors import UserError
from tools.plan.hardware import Device
from training.config import Config


def check_can_be_planned(config: Config) -> None:
    """Raises UserError for what the accounts leave out; tools/rehearse, whose GPU is a fake one,
    cannot show it either."""
    if config.parallel.cpu_offload:
        why = "moves weights and optimizer state between host and GPU, which no plan counts"
        raise UserError("parallel.cpu_offload", True, why, "set parallel.cpu_offload=false")


def check_before_search(config: Config) -> None:
    """Raises UserError for what is wrong in every layout."""
    check_can_be_planned(config)
    # What only a layout makes wrong is set to what is right on one rank; the size that this
    # replaces is looked at below.
    parallel = replace(config.parallel, tp=1, pp=1, dp_shard=1, dp_replicate=1, schedule="1f1b",
                       stages_per_rank=1, layers_per_stage=None, zero_stage=2)  # fmt: skip
    alone = replace(config, parallel=parallel, train=replace(config.train, micro_batch_size=1),
                    run=replace(config.run, profile_ranks=[0]))  # fmt: skip
    alone.validate(1)
    size = config.train.micro_batch_size
    if size < 1:
        raise UserError("train.micro_batch_size", size, "must be at least 1", "give 1 or more")


def assumptions(config: Config, device: Device) -> list[str]:
    """What the figures are of, where the run may be another."""
    lines = []
    if config.train.compile:
        lines.append(
            "planned for blocks that are not compiled; train.compile=true is a little faster and "
            "keeps a little less"
        )
    if device.name != device.efficiencies_of:
        lines.append(
            f"efficiencies are those of {device.efficiencies_of}, but for what a file of rates "
            "replaces"
        )
    return lines
