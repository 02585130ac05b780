"""AdamW over this rank's shards, and the learning-rate schedule."""

import hashlib
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from model.initialise import canonical_name
from model.kernels.adamw import Place, Rates, adamw
from parallel.placement import as_dtensor_like, local_region
from training.config import Config, OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """AdamW, stepping on the local tensors of sharded parameters; see `model/kernels/adamw.py`.

    The update is elementwise, so each rank updates its shard as if it were a parameter of its own. Matrices are decayed,
    vectors (norm weights) are not. Moments have the weights' dtype.

    Args:
        parameters: names and sharded parameters. Copies of a tied weight have the same gradient, and so take the same step.
        config: the run's.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: Config) -> None:
        self.sharded = list(parameters)
        self.config, self.kernels = config.optimizer, config.model.kernels
        self.local = [_local(p).detach() for _, p in self.sharded]  # aliases: they share the shards' memory
        # State exists from the start: a checkpoint is loaded into it in place, and a planned size is the size from step one.
        self.state = {key: [torch.zeros_like(p) for p in self.local] for key in MOMENTS}
        self.updates = torch.zeros((), dtype=torch.float32, device=self.local[0].device)  # made so far
        self.decays = [config.optimizer.weight_decay if p.ndim > 1 else 0.0 for p in self.local]
        self.places = [_place(canonical_name(name, config.model), p, config.train.seed) for name, p in self.sharded]

    def step(self, lr: float, norm: Tensor, max_norm: float) -> None:
        """Update every parameter with its gradient times min(1, max_norm / norm), and drop the gradients.

        A norm that is not finite drops them and does nothing else; the host does not learn of it. `max_norm` 0: no clipping.
        """
        kernels = self.kernels if norm.device == self.updates.device else "torch"  # weights on the CPU of a GPU
        norm = norm.to(self.updates.device)  # and then this waits
        gradients = [_local(p.grad) for _, p in self.sharded]
        rates = Rates(lr, self.config.betas, self.config.eps, max_norm)
        first, second = (self.state[key] for key in MOMENTS)
        adamw(self.local, gradients, first, second, self.decays, self.places, self.updates, norm, rates, kernels)
        for _, p in self.sharded:
            p.grad = None

    def moments(self) -> Iterator[tuple[str, DTensor]]:
        """Named moments as global tensors, sharing memory with the state: `blocks.0.….weight.exp_avg`."""
        for i, (name, p) in enumerate(self.sharded):
            assert isinstance(p, DTensor)
            for key in MOMENTS:
                yield f"{name}.{key}", as_dtensor_like(self.state[key][i], p)

    def set_step(self, step: int) -> None:
        """Set how many updates were made (steps without those that were skipped), for bias corrections and random bits."""
        self.updates.fill_(step)


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


def _place(name: str, parameter: Tensor, seed: int) -> Place:
    """Where this rank's part lies in the global tensor `name`."""
    assert isinstance(parameter, DTensor)
    region = local_region(parameter)
    rows, columns = region if len(region) == 2 else (range(1), *region)
    width = parameter.shape[-1]
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}:rounding".encode()).digest()[:4], "little")
    return Place(key, rows.start * width + columns.start, max(1, len(columns)), width)
