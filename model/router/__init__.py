"""Kinds of routers, one file each: how a token chooses its experts, and with what weights.
`model.router` names the file, whose class `Router` is used.

    softmax.py               probabilities of all experts; the chosen ones' are the weights
    softmax_renormalised.py  the same, with weights that add up to 1 (Mixtral, Qwen3)
    sigmoid_bias.py          a bias for each expert keeps their load even (DeepSeek-V3)

A kind derives from `BaseRouter` (_base.py). Settings of its own are declared in its file
(declare.py); what all routers read is a setting of the experts (model/experts.py).
docs/recipes_model.md adds one.
"""

from collections.abc import Iterator

from torch import nn

from kinds import load_kind
from model.router._base import BaseRouter

__all__ = ["BaseRouter", "bias_name", "router_class", "routers_of"]


def router_class(name: str) -> type[BaseRouter]:
    return load_kind(__name__, name, "Router")


def bias_name(layer: int) -> str:
    """The name in checkpoints of the bias of a layer's router."""
    return f"blocks.{layer}.feed_forward.router.bias"


def routers_of(stage: nn.Module) -> Iterator[tuple[int, BaseRouter]]:
    """The routers of a stage, each with the number of its layer."""
    for name, module in stage.named_modules():
        if isinstance(module, BaseRouter):
            yield int(name.split(".")[1]), module  # blocks.17.feed_forward.router
