"""Kinds of attention, one file each. `model.attention` names one kind for all layers, or a list
through which the layers cycle. The file's class `Attention` is used.

    causal.py           every token sees all tokens before it
    sliding_window.py   every token sees the nearest of these

A kind is constructed with (config, tp). Its method `inputs` derives, from the tokens' positions,
the inputs that `forward` takes besides x. `forward` maps x [S/tp, B, D] to the same shape. Settings
of its own are declared in its file (declare.py).

A kind whose tokens attend to each other derives from `BaseAttention`. Another kind must not
communicate over cp.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from errors import UserError
from kinds import load_kind
from model.config import ModelConfig
from model.largest_logits import LargestLogits
from parallel.context import Attend
from parallel.layer import TensorParallel


class BaseAttention(nn.Module):
    """Attention in two halves, between which its last input, `attend` (parallel/context.py), is
    called. What it communicates over cp is in there only, so the halves can be compiled
    (parallel/activation.py). Another projection is a subclass that overrides `project`; `forward`
    is never overridden, because compiled code calls the halves."""

    local_heads: int  # of this tp rank
    largest: LargestLogits | None = None  # of these heads, in runs that ask for it

    def forward(self, x: Tensor, *inputs: Any) -> Tensor:
        *others, attend = inputs
        return self.combine(attend(*self.project(x, *others)))

    def project(self, x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        """x [S/tp, B, D] → q [S, B, H/tp, E], and k and v [S, B, max(1, K/tp), E]."""
        raise NotImplementedError

    def combine(self, y: Tensor) -> Tensor:
        """What tokens have attended to, y [S, B, H/tp, E] → [S/tp, B, D]."""
        raise NotImplementedError

    def watched(self, attend: Attend) -> Attend:
        """What `inputs` returns last: `attend`, whose largest logits may be noted."""
        return attend if self.largest is None else self.largest.watch(attend)

    def watch_logits(self, device: str, exact: torch.dtype) -> LargestLogits:
        """Be able to note the largest logits from now on, for QK-clip (training/qk_clip.py)."""
        self.largest = LargestLogits(self.local_heads, device, exact)
        return self.largest

    def rows_of_heads(self) -> Mapping[str, Sequence[tuple[int, float]]]:
        """For QK-clip: which rows to multiply so that a head's logits are multiplied by γ. For each
        projection, of a head's rows from the first on: (how many, power of γ). Raises UserError."""
        key, why = "optimizer.muon.qk_clip", f"{type(self).__module__} does not say which rows"
        raise UserError(key, "above 0", f"{why} decide its logits", "write its rows_of_heads")


def attentions_of(stage: nn.Module) -> Iterator[tuple[str, BaseAttention]]:
    """The attention layers of a stage whose tokens attend to each other, by name."""
    return ((n, each) for n, each in stage.named_modules() if isinstance(each, BaseAttention))


def make_attention(config: ModelConfig, layer: int, tp: TensorParallel) -> Any:
    """The attention of block `layer`."""
    return load_kind(__name__, config.attention_of(layer), "Attention")(config, tp)
