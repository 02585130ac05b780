"""The model's blocks of each kind, and its number of parameters."""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache

from torch import nn

from costs.units import kinds_of_layers
from model.config import ModelConfig
from model.experts import Experts
from model.transformer import Block, Transformer
from parallel.layer import TensorParallel
from parallel.parameter import NamedWeight, weights_of


@lru_cache(maxsize=64)
def kinds_of_blocks(config: ModelConfig, tp: int = 1) -> list[tuple[Block, int]]:
    """One block of each kind, on the meta device with the shapes of one of `tp` ranks, and the
    number of such blocks in the model.

    Raises UserError, which names the key, if some layer cannot be split over `tp` ranks.
    """
    kinds = kinds_of_layers(config)
    counts, first = Counter(kinds), {kind: kinds.index(kind) for kind in kinds}
    return [(Block(config, first[kind], TensorParallel(tp)), n) for kind, n in counts.items()]


@lru_cache(maxsize=64)
def num_parameters(config: ModelConfig) -> int:
    """The number of trainable parameters of the whole model; a tied embedding counts once."""
    return sum_over_weights(config, lambda each: each.numel)


@lru_cache(maxsize=64)
def num_active_parameters(config: ModelConfig) -> int:
    """The number of parameters that one token is computed with: of the experts only those that it
    chooses."""

    def active(each: NamedWeight) -> int:
        if not each.spec.is_expert:
            return each.numel
        experts = config.of(Experts)
        return each.numel // experts.count * experts.per_token

    return sum_over_weights(config, active)


def sum_over_weights(config: ModelConfig, number: Callable[[NamedWeight], int]) -> int:
    """The sum of a number of each weight of the whole model; a tied embedding counts once."""

    def count(module: nn.Module) -> int:
        return sum(number(each) for each in weights_of(module) if not each.is_copy)

    ends = Transformer(config, [], True, True, TensorParallel())
    return count(ends) + sum(n * count(block) for block, n in kinds_of_blocks(config))


def check_tp(config: ModelConfig, tp: int) -> None:
    """Raise UserError, which names the key, if some layer cannot be split over `tp` ranks."""
    kinds_of_blocks(config, tp)
    Transformer(config, [], True, True, TensorParallel(tp))
