"""Optimizers over this rank's shards, a file each: `optimizer.name` is the file's, and its class
`Optimizer` is used.

    adamw.py   AdamW, in one launch for all weights; can round stochastically, for bfloat16

Another optimizer is another file here, and nothing else. What it keeps of each weight it says in
`state_names`, which checkpoints, the memory report and the planner ask.
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
from training.config import Config
from training.precision import Precision


class ShardedOptimizer(ABC):
    """Updates sharded weights in place.

    Args:
        weights: this rank's, sharded. Copies of a tied weight have the same gradient, and so take
            the same step.
        config: the run's.
    """

    # Tensors kept of each weight; each has its shape, placement and dtype.
    state_names: tuple[str, ...]
    # Without it states in bfloat16 would lose small updates (optimizer.pure_bfloat16).
    rounds_stochastically = False

    def __init__(self, weights: Sequence[NamedWeight], config: Config) -> None:
        self.weights, self.config = weights, config.optimizer
        # aliases: they share the shards' memory
        self.shards = [each.sharded.to_local() for each in weights]
        # State exists from the start: a checkpoint is loaded into it in place, and a planned size
        # is the size from step one.
        self.state = {name: [torch.zeros_like(p) for p in self.shards] for name in self.state_names}
        # made so far
        self.updates = torch.zeros((), dtype=torch.float32, device=self.shards[0].device)
        decay = config.optimizer.weight_decay
        self.decays = [decay if each.spec.group.decays else 0.0 for each in weights]

    @abstractmethod
    def update(self, lr: float, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        """Update `shards`, `state` and `updates`.

        Args:
            lr: of this step.
            gradients: shaped as `shards`; each counts times min(1, max_norm / norm).
            norm: a float64 scalar on the device of `updates`. Where it is not finite, nothing may
                change; the host is not told.
            max_norm: 0: no clipping.
        """

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor, max_norm: float) -> None:
        """Update every weight, and drop the gradients."""
        norm = norm.to(self.updates.device)  # weights on the CPU of a GPU wait for it here
        self.update(lr, [each.gradient.to_local() for each in self.weights], norm, max_norm)
        for each in self.weights:
            each.parameter.grad = None

    def state_tensors(self) -> Iterator[tuple[NamedWeight, str, DTensor]]:
        """Each weight's state as global tensors that share its memory: the weight, the state's
        name, the tensor."""
        for i, each in enumerate(self.weights):
            for name in self.state_names:
                yield each, name, as_dtensor_like(self.state[name][i], each.sharded)

    def set_updates(self, updates: int) -> None:
        """How many updates were made (steps without those that were skipped), for bias corrections
        and random bits."""
        self.updates.fill_(updates)


def optimizer_class(name: str) -> type[ShardedOptimizer]:
    """The class of `optimizer.name`."""
    found: type[ShardedOptimizer] = load_kind(__name__, name, "Optimizer")
    return found


def check_optimizer(config: Config) -> None:
    """Raises UserError for what the optimizer of the configuration cannot do."""
    name = config.optimizer.name
    if config.optimizer.pure_bfloat16 and not optimizer_class(name).rounds_stochastically:
        why = f"{name} rounds to nearest, and would lose small updates"
        raise UserError("optimizer.pure_bfloat16", True, why, "set optimizer.pure_bfloat16=false")


def state_bytes(config: Config) -> int:
    """Of a parameter between steps: its weight, and what the optimizer keeps of it."""
    states = len(optimizer_class(config.optimizer.name).state_names)
    return (1 + states) * Precision.of(config).master.itemsize
