"""AdamW as torch has it; vectors do not decay."""

from collections.abc import Mapping

import torch
from torch import nn

from settings.sections import OptimizerConfig


def make(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig
) -> list[torch.optim.Optimizer]:
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    own = getattr(config, config.name)
    return [torch.optim.AdamW(groups, betas=own.betas, eps=own.eps)]
