"""Optimizers over this rank's shards, one file each. `optimizer.name` is the name of the file,
whose class `Optimizer` is used.

    adamw.py   AdamW, in one launch for all weights; can round stochastically, for bfloat16

To add an optimizer, add a file here; nothing else changes. Settings that only it reads are declared
in it (declare.py). Its `state_names` list the tensors that
it keeps for each weight; checkpoints, the memory report and the planner read them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from errors import UserError
from kinds import load_kind
from parallel.parameter import NamedWeight
from parallel.placement import as_dtensor_like
from settings.config import Config
from settings.precision import Precision


class ShardedOptimizer(ABC):
    """Updates sharded weights in place.

    Args:
        weights: this rank's sharded weights. Copies of a tied weight have the same gradient, and so
            take the same step.
        config: the configuration of the run.
    """

    # Tensors kept for each weight, with its shape, placement and dtype.
    state_names: tuple[str, ...]
    # Without it, weights and state in bfloat16 would lose small updates (optimizer.pure_bfloat16).
    rounds_stochastically = False

    def __init__(self, weights: Sequence[NamedWeight], config: Config) -> None:
        self.weights, self.config = weights, config.optimizer
        # aliases that share the memory of the weights
        self.shards = [each.sharded.to_local() for each in weights]
        # The state exists from the start, so that a checkpoint can be loaded into it in place and
        # memory has its planned size from the first step.
        self.state = {name: [torch.zeros_like(p) for p in self.shards] for name in self.state_names}
        # number of updates made so far
        self.updates = torch.zeros((), dtype=torch.float32, device=self.shards[0].device)
        decay = config.optimizer.weight_decay
        self.decays = [decay if each.spec.group.decays else 0.0 for each in weights]

    @abstractmethod
    def update(self, lr: float, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        """Update `shards`, `state` and `updates`.

        Args:
            lr: the learning rate of this step.
            gradients: shaped like `shards`; each is multiplied by min(1, max_norm / norm).
            norm: a float64 scalar on the device of `updates`. If it is not finite, nothing may
                change; the host does not learn of it.
            max_norm: the norm to clip to; 0: no clipping.
        """

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor, max_norm: float) -> None:
        """Update every weight, and free the gradients."""
        norm = norm.to(self.updates.device)  # with cpu_offload on a GPU, the host waits for it here
        self.update(lr, [each.gradient.to_local() for each in self.weights], norm, max_norm)
        for each in self.weights:
            each.parameter.grad = None

    def state_tensors(self) -> Iterator[tuple[NamedWeight, str, DTensor]]:
        """The state of each weight as global tensors that share its memory: (weight, name of the
        state, tensor)."""
        for i, each in enumerate(self.weights):
            for name in self.state_names:
                yield each, name, as_dtensor_like(self.state[name][i], each.sharded)

    def set_updates(self, updates: int) -> None:
        """Set the number of updates made (steps minus skipped ones), on which bias corrections and
        random bits depend."""
        self.updates.fill_(updates)


def optimizer_class(name: str) -> type[ShardedOptimizer]:
    """The class of `optimizer.name`."""
    found: type[ShardedOptimizer] = load_kind(__name__, name, "Optimizer")
    return found


def check_optimizer(config: Config) -> None:
    """Raise UserError if the configured optimizer does not support the configuration."""
    name = config.optimizer.name
    if config.optimizer.pure_bfloat16 and not optimizer_class(name).rounds_stochastically:
        why = f"{name} rounds to nearest and would lose small updates"
        raise UserError("optimizer.pure_bfloat16", True, why, "set optimizer.pure_bfloat16=false")


def state_bytes(config: Config) -> int:
    """Bytes per parameter between steps: the weight, and the optimizer's state."""
    states = len(optimizer_class(config.optimizer.name).state_names)
    return (1 + states) * Precision.of(config).master.itemsize
