"""Settings that may be meant, but are more often a mistake. A start warns of them; what can only be
a mistake is refused (settings/checks.py)."""

import math

from settings.config import Config
from settings.data_stages import DataStage, data_stages

FEW_SIGMAS = 3  # beyond which 0.1 % of normally distributed losses are


def doubts(config: Config) -> list[str]:
    """What a start warns of, in words."""
    return _of_training(config) + [
        f"{f'data_stages.{stage.number}.' if stage.number else ''}{doubt}"
        for stage in data_stages(config)
        if stage.phase.start == stage.steps.start  # else it is in the phase of the one before
        for doubt in _of_phase(stage)
    ]


def _of_training(config: Config) -> list[str]:
    found = []
    (first, second), sigmas = config.optimizer.betas, config.guard.spike_sigmas
    if first > second:
        found.append(
            f"optimizer.betas=[{first}, {second}]: the first is larger, so training may diverge; "
            "are they swapped?"
        )
    if 0 < sigmas < FEW_SIGMAS:
        share = math.erfc(sigmas / math.sqrt(2)) / 2
        found.append(
            f"guard.spike_sigmas={sigmas:g} skips about {share:.1%} of the updates of a healthy run"
        )
    keep, interval = config.checkpoint.keep_every, config.checkpoint.interval
    if keep and isinstance(interval, int) and interval and keep % interval:
        found.append(
            f"checkpoint.keep_every={keep} is no multiple of checkpoint.interval={interval}, so it "
            f"keeps only every {math.lcm(keep, interval):,}th step"
        )
    model = config.model
    if model.has_experts and model.experts_per_token == model.num_experts:
        found.append(
            f"model.experts_per_token={model.num_experts} is all experts: no token leaves one out, "
            "so the router chooses nothing"
        )
    return found


def _of_phase(stage: DataStage) -> list[str]:
    """About the learning rate of a phase."""
    optimizer, steps, found = stage.config.optimizer, len(stage.phase), []
    if not optimizer.lr:
        return ["optimizer.lr is 0: no weight changes"]
    if 0 < steps <= optimizer.warmup_steps:
        found.append(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is not less than the {steps} steps: "
            "the learning rate rises until the end"
        )
    shrinks = optimizer.lr * optimizer.weight_decay
    if shrinks > 1:
        found.append(
            f"optimizer.lr · optimizer.weight_decay is {shrinks:g}: above 1, each step turns the "
            "sign of every weight"
        )
    return found
