"""Kinds of attention, a file each: `model.attention` names one for every layer, or a list of them
that the layers take in turn. Its class `Attention` is used.

    causal.py           every token sees all before it
    sliding_window.py   the nearest model.attention_window of them

A kind is made with (config, tp), says what it wants to know of the tokens' positions (`inputs`),
and maps x [S/tp, B, D] to the same; these inputs go to its `forward`.
"""

from typing import Any

from kinds import load_kind
from model.config import ModelConfig
from parallel.layer import TensorParallel


def make_attention(config: ModelConfig, layer: int, tp: TensorParallel) -> Any:
    """The attention of block `layer`."""
    return load_kind(__name__, config.attention_of(layer), "Attention")(config, tp)
