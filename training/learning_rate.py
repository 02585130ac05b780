"""The learning rate of each step."""

import math

from errors import UserError
from training.sections import OptimizerConfig


def learning_rate(step: int, phase: range, config: OptimizerConfig) -> float:
    """The learning rate of step `step`, 0-based, in `phase`, the steps of the run or of stages.

    Linear warmup to lr, then `cosine` to min_lr_ratio · lr at the end (Loshchilov and Hutter 2017,
    https://arxiv.org/abs/1608.03983), `linear` likewise, `stable` (constant), or `wsd`: constant,
    then linear over the last decay_steps (Hu et al. 2024, https://arxiv.org/abs/2404.06395).
    """
    step, steps = step - phase.start, len(phase)
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "stable":
        return config.lr
    floor = config.min_lr_ratio
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    if config.schedule == "linear":
        return config.lr * (1 - (1 - floor) * progress)
    if config.schedule == "cosine":
        return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
    left = steps - step  # wsd
    return config.lr * (floor + (1 - floor) * min(1.0, left / config.decay_steps))


def check_learning_rate(config: OptimizerConfig, phase: range, in_stages: bool) -> None:
    """Raise UserError if `decay_steps` does not fit the schedule. `in_stages`: the run has several
    stages, of which some share the phase."""
    steps, decay, warmup = len(phase), config.decay_steps, config.warmup_steps
    given = f"its phase of {steps} steps" if in_stages else f"train.steps={steps}"
    if config.schedule != "wsd":
        if not decay:
            return
        why = f"schedule {config.schedule} does not read it"
        remedy = "leave it out, or set optimizer.schedule=wsd"
    elif not 0 < decay <= steps:
        why = f"schedule wsd decays over the last steps of {given}"
        remedy = f"give a number between 1 and {steps}, often a tenth or a fifth of it"
    elif warmup + decay > steps:
        why = f"with optimizer.warmup_steps={warmup} they would be more than {given}: the rate "
        why += "would fall at once from where warmup ends to where the decay is by then"
        remedy = f"give at most {steps - warmup}, or " if warmup < steps else "give "
        remedy += f"optimizer.warmup_steps={steps - decay} or less"
    else:
        return
    raise UserError("optimizer.decay_steps", decay, why, remedy)
