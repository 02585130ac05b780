"""Kinds of feed-forward, a file each: `model.feed_forward` names one for every layer, or a list of
them that the layers take in turn. Its class `FeedForward` is used.

    swiglu.py   gated, as Llama has it

A kind is made with (config, tp), and maps x [S/tp, B, D] to the same.
"""

from torch import nn

from kinds import load_kind
from model.config import ModelConfig
from parallel.layer import TensorParallel


def make_feed_forward(config: ModelConfig, layer: int, tp: TensorParallel) -> nn.Module:
    """The feed-forward of block `layer`."""
    kind = load_kind(__name__, config.feed_forward_of(layer), "FeedForward")
    made: nn.Module = kind(config, tp)
    return made
