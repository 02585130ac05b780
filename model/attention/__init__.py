"""Kinds of attention, one file each. `model.attention` names one kind for all layers, or a list
through which the layers cycle. The file's class `Attention` is used.

    causal.py           every token sees all tokens before it
    sliding_window.py   every token sees the nearest of these

A kind is constructed with (config, tp). Its method `inputs` derives, from the tokens' positions,
the inputs that `forward` takes besides x. `forward` maps x [S/tp, B, D] to the same shape. Settings
of its own are declared in its file (declare.py).

A kind whose tokens attend to each other says so in two methods, between which its last input,
`attend` (parallel/context.py), is called: forward is combine(attend(*project(x, *others))). Another
projection is a subclass that overrides `project`. What it communicates over cp is in `attend` only,
so the two can be compiled (parallel/compiled.py). A kind without them must not communicate over cp.
"""

from typing import Any

from kinds import load_kind
from model.config import ModelConfig
from parallel.layer import TensorParallel


def make_attention(config: ModelConfig, layer: int, tp: TensorParallel) -> Any:
    """The attention of block `layer`."""
    return load_kind(__name__, config.attention_of(layer), "Attention")(config, tp)
