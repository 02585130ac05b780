"""Optimizers over this rank's shards, one file each. `optimizer.name` is the name of the file,
whose class `Optimizer` is used.

    adamw.py   AdamW, in one launch for all weights; can round stochastically, for bfloat16
    muon.py    Muon on whole matrices, and AdamW for the weights that are none

To add an optimizer, add a file here; nothing else changes. Settings that only it reads are declared
in it (declare.py). Its `states_of` describes the tensors that it keeps for a weight; checkpoints,
the memory report and the planner ask it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kinds import load_kind
from parallel.disk import DiskMemory, aligned
from parallel.parameter import NamedWeight, WeightSpec
from parallel.whole_matrices import axes_of
from settings.config import Config


class State(NamedTuple):
    """A tensor that an optimizer keeps for a weight."""

    # Of the weight; each is sharded as there. One number per row: range(max(1, ndim - 1)), which is
    # (0,) of a matrix [out, in] and (0, 1) of experts' [X, out, in].
    dims: Sequence[int]
    dtype: torch.dtype | None = None  # None: that of the weight

    def shape(self, shape: Sequence[int]) -> list[int]:
        """The state's shape for a weight, or a part of one, of this shape."""
        return [shape[dim] for dim in self.dims]

    def bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """Bytes for a weight, or a part of one, of this shape and `itemsize` bytes per element."""
        return math.prod(self.shape(shape)) * (self.dtype.itemsize if self.dtype else itemsize)


def bytes_of_states(states: Mapping[str, State], shape: Sequence[int], itemsize: int) -> int:
    """Bytes of all states of a weight of this shape, as of `State.bytes`."""
    return sum(state.bytes(shape, itemsize) for state in states.values())


def like(weight: WeightSpec) -> State:
    """A state with the shape and dtype of the weight."""
    return State(range(len(weight.shape)))


class ShardedOptimizer(ABC):
    """Updates sharded weights in place.

    Args:
        weights: sharded weights of this rank: all, or a group of them (training/update.py). Copies
            of a tied weight have the same gradient, and so take the same step.
        config: the configuration of the run.
    """

    # Without it, weights and state in bfloat16 would lose small updates (optimizer.pure_bfloat16).
    rounds_stochastically = False

    def __init__(self, weights: Sequence[NamedWeight], config: Config) -> None:
        self.weights, self.config = weights, config.optimizer
        # aliases that share the memory of the weights
        self.shards = [each.sharded.to_local() for each in weights]
        # The state exists from the start, so that a checkpoint can be loaded into it in place and
        # memory has its planned size from the first step.
        self.states: list[dict[str, Tensor]] = []  # of each weight
        self.file: DiskMemory | None = None  # which has the states, with parallel.offload=disk
        new_zeros: Callable[..., Tensor] = Tensor.new_zeros
        if config.parallel.offload == "disk":
            self.file = DiskMemory(config.parallel.offload_dir, sum(map(self.file_bytes, weights)))
            new_zeros = self.file.new_zeros
        for each, shard in zip(weights, self.shards, strict=True):
            kept = self.states_of(each.spec).items()
            zeros = {n: new_zeros(shard, s.shape(shard.shape), dtype=s.dtype) for n, s in kept}
            self.states.append(zeros)
        # number of updates made so far (steps minus skipped ones), on which bias corrections and
        # random bits depend
        self.updates = torch.zeros((), dtype=torch.float32, device=self.shards[0].device)
        decay = config.optimizer.weight_decay
        self.decays = [decay if each.spec.group.decays else 0.0 for each in weights]

    @classmethod
    def file_bytes(cls, weight: NamedWeight) -> int:
        """Bytes of this rank's states of a weight in a file."""
        part = weight.sharded.to_local()
        states = cls.states_of(weight.spec).values()
        return sum(aligned(state.bytes(part.shape, part.element_size())) for state in states)

    @staticmethod
    @abstractmethod
    def states_of(weight: WeightSpec) -> dict[str, State]:
        """What is kept for a weight, by name. It begins at 0."""

    @staticmethod
    def takes_whole(weight: WeightSpec) -> bool:
        """Whether its matrices are put together on a rank (parallel/whole_matrices.py)."""
        return False

    @staticmethod
    def products_in(master: torch.dtype) -> torch.dtype:
        """The dtype of products with whole matrices on a GPU, by that of the weights."""
        return master if master == torch.float64 else torch.bfloat16

    @staticmethod
    def flops(matrix: Sequence[int]) -> float:
        """Of the products with a whole matrix of this shape."""
        return 0.0

    @abstractmethod
    def update(self, lr: float, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        """Update `shards`, `states` and `updates`.

        Args:
            lr: the learning rate of this step.
            gradients: shaped like `shards`; each is multiplied by min(1, max_norm / norm).
            norm: a float64 scalar on the device of `updates`. If it is not finite, nothing may
                change; the host does not learn of it.
            max_norm: the norm to clip to; 0: no clipping.
        """

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor, max_norm: float) -> None:
        """Update every weight, and free the gradients. `norm`, `max_norm`: as of `update`."""
        self.update(lr, [each.gradient.to_local() for each in self.weights], norm, max_norm)
        for each in self.weights:
            each.parameter.grad = None

    def sum_over_parts(self, name: str, terms: Sequence[Tensor]) -> None:
        """Sum in place this rank's terms of the state `name`, one for each weight, over the ranks
        that hold other parts of the dimensions that the state lacks."""
        for each, term in zip(self.weights, terms, strict=True):
            dims = self.states_of(each.spec)[name].dims
            for axis in axes_of(each.sharded):
                if axis.cuts_beside(dims):
                    dist.all_reduce(term, group=axis.group)


def optimizer_class(name: str) -> type[ShardedOptimizer]:
    """The class of `optimizer.name`."""
    return load_kind(__name__, name, "Optimizer")
