"""Kinds of feed-forward, one file each. `model.feed_forward` names one kind for all layers, or a
list through which the layers cycle. The file's class `FeedForward` is used.

    swiglu.py   gated, as in Llama
    experts.py  a mixture of experts

A kind is constructed with (config, tp, ep) and maps x [S/tp, B, D] to the same shape. Settings of
its own are declared in its file (declare.py); those of experts, which others read too, in
model/experts.py.
"""

from torch import nn

from kinds import load_kind
from model.config import ModelConfig
from parallel.expert import ExpertParallel
from parallel.layer import TensorParallel


def make_feed_forward(
    config: ModelConfig, layer: int, tp: TensorParallel, ep: ExpertParallel
) -> nn.Module:
    """The feed-forward of block `layer`."""
    return load_kind(__name__, config.feed_forward_of(layer), "FeedForward")(config, tp, ep)
