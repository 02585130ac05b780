"""AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101) over this rank's shards. The
arithmetic is in model/kernels/adamw.py."""

import hashlib
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from declare import between, section
from model.kernels.adamw import Location, Rates, adamw
from parallel.parameter import NamedWeight, WeightSpec
from parallel.placement import local_region
from settings.config import Config
from training.optimizers import ShardedOptimizer, State, like

Beta = Annotated[float, Field(ge=0, lt=1)]


@section("optimizer.adamw")
class Settings:
    """Of AdamW."""

    name: ClassVar[str] = "adamw"
    # how slowly the means of gradients and of their squares change, per step
    betas: Annotated[tuple[Beta, Beta], Field(strict=False, examples=[[0.9, 0.95]])] = (0.9, 0.95)
    # added to the root of the mean square, by which the step is divided
    eps: Annotated[float, between(1e-30, 1, example=1e-8)] = 1e-8

    def doubts(self) -> list[str]:
        """What a start warns of."""
        first, second = self.betas
        if first <= second:
            return []
        why = "the first is larger, so training may diverge; are they swapped?"
        return [f"optimizer.{self.name}.betas=[{first}, {second}]: {why}"]


class Optimizer(ShardedOptimizer):
    """AdamW. The update is elementwise, so each rank updates its shard as if it were a separate
    parameter."""

    rounds_stochastically = True
    settings = Settings

    def __init__(self, weights: Sequence[NamedWeight], config: Config) -> None:
        super().__init__(weights, config)
        self.kernels = config.kernels_of_states
        # of the weights that this optimizer updates: all, but another may take a part of them
        self.mine = [i for i, states in enumerate(self.states) if "exp_avg" in states]
        self.locations = [_location(weights[i], config.train.seed) for i in self.mine]
        self.first = [self.states[i]["exp_avg"] for i in self.mine]
        self.second = [self.states[i]["exp_avg_sq"] for i in self.mine]

    @staticmethod
    def states_of(weight: WeightSpec) -> dict[str, State]:
        return {"exp_avg": like(weight), "exp_avg_sq": like(weight)}

    def update(self, lr: float, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        own = self.config.of(self.settings)
        rates = Rates(lr, own.betas, own.eps, max_norm)
        shards, gradients = [self.shards[i] for i in self.mine], [gradients[i] for i in self.mine]
        decays = [self.decays[i] for i in self.mine]
        adamw(
            shards, gradients, self.first, self.second, decays, self.locations, self.updates, norm,
            rates, self.kernels,
        )  # fmt: skip


def _location(each: NamedWeight, seed: int) -> Location:
    """The location of this rank's part in the global tensor. Besides the first dimension, only the
    second may be sharded."""
    region, shape = local_region(each.sharded), each.spec.shape
    cut = [dim for dim in range(1, len(shape)) if len(region[dim]) < shape[dim]]
    assert cut in ([], [1]), (
        f"{each.name}: dimensions {cut} are sharded, but the kernel supports only 0 and 1"
    )
    row = math.prod(shape[1:])  # elements in a row of the global tensor
    inner = math.prod(shape[2:])  # elements of a row that stay contiguous when it is sharded
    columns = region[1] if len(shape) > 1 else range(1)
    key = int.from_bytes(
        hashlib.sha256(f"{seed}:{each.global_name}:rounding".encode()).digest()[:4], "little"
    )
    return Location(
        key, region[0].start * row + columns.start * inner, max(1, len(columns) * inner), row
    )
