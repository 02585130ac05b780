"""The learning rate of each step."""

import math

from settings.sections import OptimizerConfig


def learning_rate(step: int, phase: range, config: OptimizerConfig) -> float:
    """The learning rate of step `step`, 0-based, in `phase`, steps of the run or of data stages.

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
