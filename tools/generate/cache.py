"""The key/value cache: with the keys and values of earlier tokens stored, the next token costs the
computation of one token and not of all.

    position    0    1    2    3    4    5
    prompt     the  cat  sat                 at once: causal attention
    then                      on             one token each: it attends to all that are stored, or
    then                           the       to the nearest of them, of a window
"""

from collections import defaultdict
from functools import partial
from weakref import proxy

import torch
from torch import Tensor
from torch.nn import functional

from model.mask import make_mask
from model.positions import Angles, Rotary, rotary_angles
from parallel.context import Attend


class KeyValueCache:
    """The cache of all layers for one text.

    Args:
        length: the most tokens that the text will have. The model gets those of the prompt first,
            and then one at a time.
        dtype, device: those of the model's activations.
    """

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length, self.dtype = length, dtype
        self.current = slice(0, 0)  # the tokens that the model gets
        # proxy: in a cycle, memory would wait for the garbage collector
        self.layers: dict[str, LayerCache] = defaultdict(partial(LayerCache, proxy(self)))
        self._positions = torch.arange(length, device=device).unsqueeze(1)  # [length, 1]
        self._angles: dict[Rotary, Angles] = {}

    def next(self, count: int) -> None:
        """Advances to the next `count` tokens."""
        filled = self.current.stop
        assert count == 1 or filled == 0, "the prompt comes first and at once, then single tokens"
        self.current = slice(filled, filled + count)

    def angles(self, rotary: Rotary) -> Angles:
        """The angles of the current tokens."""
        if rotary not in self._angles:
            self._angles[rotary] = rotary_angles(self._positions, rotary, self.dtype)
        return Angles(*(each[self.current] for each in self._angles[rotary]))

    def attend(self, window: int | None, head_dim: int) -> Attend:
        """The attention among the tokens of the prompt, or of one token to those before it."""
        if self.current.start > 0:
            return partial(attend_last, window=window)
        return make_mask(self._positions[self.current], None, window, self.dtype, head_dim)


class LayerCache:
    """One layer's keys, with rotary embedding applied, and values, each [length, 1, heads, E], for
    this tp rank's key/value heads. Its attention sees the interface that `Positions` has in
    training (model/positions.py)."""

    def __init__(self, whole: KeyValueCache) -> None:
        self.whole = whole
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k and v [S, 1, heads, E] of the current tokens; returns those of all tokens so far
        as views."""
        if self.keys is None or self.values is None:
            self.keys = k.new_empty((self.whole.length, *k.shape[1:]))
            self.values = v.new_empty((self.whole.length, *v.shape[1:]))
        current = self.whole.current
        self.keys[current], self.values[current] = k, v
        return self.keys[: current.stop], self.values[: current.stop]

    def angles(self, rotary: Rotary) -> Angles:
        return self.whole.angles(rotary)

    def mask(self, window: int | None, head_dim: int, kernel: str) -> Attend:
        # The kernel that trains may not take a prompt of any length: "auto" is used.
        attend = self.whole.attend(window, head_dim)
        return lambda q, k, v: attend(q, *self.append(k, v))


def attend_last(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attention of the last token's queries [1, 1, H, E] to the keys and values [S, 1, K, E] of all
    tokens, or of the last `window` → [1, 1, H, E].

    The H/K queries of a key/value head are the rows of one matrix product: no head is repeated, and
    the keys, whose reading dominates the time, are read once.
    """
    if window is not None:
        k, v = k[-window:], v[-window:]
    rows = q.reshape(1, k.shape[2], -1, q.shape[3])  # [1, K, H/K, E]
    k, v = k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)  # [1, K, S, E]
    return functional.scaled_dot_product_attention(rows, k, v).reshape(q.shape)
