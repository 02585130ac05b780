"""AdamW over this rank's shards, and the learning-rate schedule."""

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from model.kernels.adamw import Location, Rates, adamw
from parallel.parameter import NamedWeight
from parallel.placement import as_dtensor_like, local_region
from training.config import Config, OptimizerConfig


class ShardedAdamW:
    """AdamW, stepping on the local tensors of sharded parameters; see `model/kernels/adamw.py`.

    The update is elementwise, so each rank updates its shard as if it were a parameter of its own. Moments have the weights'
    dtype.

    Args:
        weights: this rank's, sharded. Copies of a tied weight have the same gradient, and so take the same step.
        config: the run's.
    """

    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")  # tensors of each weight, shaped and placed as it is

    def __init__(self, weights: Sequence[NamedWeight], config: Config) -> None:
        self.weights = weights
        self.config, self.kernels = config.optimizer, config.model.kernels
        self.local = [each.sharded.to_local() for each in weights]  # aliases: they share the shards' memory
        # State exists from the start: a checkpoint is loaded into it in place, and a planned size is the size from step one.
        self.state = {key: [torch.zeros_like(p) for p in self.local] for key in self.state_names}
        self.updates = torch.zeros((), dtype=torch.float32, device=self.local[0].device)  # made so far
        self.decays = [config.optimizer.weight_decay if each.weight.decays else 0.0 for each in weights]
        self.locations = [_location(each, config.train.seed) for each in weights]

    def step(self, lr: float, norm: Tensor, max_norm: float) -> None:
        """Update every parameter with its gradient times min(1, max_norm / norm), and drop the gradients.

        A norm that is not finite drops them and does nothing else; the host does not learn of it. `max_norm` 0: no clipping.
        """
        kernels = self.kernels if norm.device == self.updates.device else "torch"  # weights on the CPU of a GPU
        norm = norm.to(self.updates.device)  # and then this waits
        gradients = [each.gradient.to_local() for each in self.weights]
        rates = Rates(lr, self.config.betas, self.config.eps, max_norm)
        first, second = (self.state[key] for key in self.state_names)
        adamw(self.local, gradients, first, second, self.decays, self.locations, self.updates, norm, rates, kernels)
        for each in self.weights:
            each.parameter.grad = None

    def moments(self) -> Iterator[tuple[NamedWeight, str, DTensor]]:
        """Each weight's moments as global tensors, sharing memory with the state: the weight, `exp_avg`, the tensor."""
        for i, each in enumerate(self.weights):
            for key in self.state_names:
                yield each, key, as_dtensor_like(self.state[key][i], each.sharded)

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


def _location(each: NamedWeight, seed: int) -> Location:
    """Where this rank's part lies in the global tensor. Beside the first dimension one other may be cut."""
    region, shape = local_region(each.sharded), each.weight.shape
    cut = [dim for dim in range(1, len(shape)) if len(region[dim]) < shape[dim]]
    assert cut in ([], [1]), f"{each.name}: dimensions {cut} are cut, and the kernel counts in rows and columns"
    row = math.prod(shape[1:])  # numbers of the global tensor
    inner = math.prod(shape[2:])  # of them, those that follow each other whatever is cut
    columns = region[1] if len(shape) > 1 else range(1)
    key = int.from_bytes(hashlib.sha256(f"{seed}:{each.global_name}:rounding".encode()).digest()[:4], "little")
    return Location(key, region[0].start * row + columns.start * inner, max(1, len(columns) * inner), row)
