"""AdamW over this rank's shards, and the learning-rate schedule."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.placement import as_dtensor_like
from training.config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """torch's fused AdamW, stepping on the local tensors of sharded parameters.

    The update is elementwise, so each rank updates its shard as if it were a parameter of its own. Matrices are decayed,
    vectors (norm weights) are not.

    Args:
        parameters: names and sharded parameters. Copies of a tied weight have the same gradient, and so take the same step.
        config: the section `optimizer.`.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> None:
        self.sharded = list(parameters)
        self.local = [nn.Parameter(_local(p).detach()) for _, p in self.sharded]  # aliases: they share the shards' memory
        groups = [
            {"params": [p for p in self.local if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in self.local if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
        # State exists from the start: a checkpoint is loaded into it in place, and a planned size is the size from step one.
        for p in self.local:
            zeros = {key: torch.zeros_like(p, memory_format=torch.preserve_format) for key in MOMENTS}
            self.adamw.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device), **zeros}

    def local_gradients(self) -> list[Tensor]:
        return [_local(p.grad) for _, p in self.sharded if p.grad is not None]

    def step(self, lr: float) -> None:
        """Update every parameter with its gradient, and drop the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        for local, (_, p) in zip(self.local, self.sharded, strict=True):
            assert p.grad is not None
            local.grad = _local(p.grad)
        self.adamw.step()
        for local, (_, p) in zip(self.local, self.sharded, strict=True):
            local.grad = p.grad = None

    def moments(self) -> Iterator[tuple[str, DTensor]]:
        """Named moments as global tensors, sharing memory with the state: `blocks.0.….weight.exp_avg`."""
        for local, (name, p) in zip(self.local, self.sharded, strict=True):
            assert isinstance(p, DTensor)
            for key in MOMENTS:
                yield f"{name}.{key}", as_dtensor_like(self.adamw.state[local][key], p)

    def set_step(self, step: int) -> None:
        """Set how many updates were made, for the bias correction after a resume."""
        for local in self.local:
            self.adamw.state[local]["step"].fill_(step)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of update `step`, 0-based, of a run of `steps`.

    Linear warmup to lr, then `cosine` to min_lr_ratio · lr at the end (Loshchilov and Hutter 2017,
    https://arxiv.org/abs/1608.03983), or `wsd`: constant, then linear over the last decay_steps (Hu et al. 2024,
    https://arxiv.org/abs/2404.06395).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    floor = config.min_lr_ratio
    if config.schedule == "cosine":
        progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
        return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
    left = steps - step  # wsd
    return config.lr * (floor + (1 - floor) * min(1.0, left / config.decay_steps))


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
