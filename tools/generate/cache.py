"""The key/value cache: with the keys and values of earlier tokens stored, the next token costs the
computation of one token and not of all.

A batch of prompts is padded on the left, so that the last token of every prompt is in the same
slot, and so is every later token.

    slot          0    1    2    3    4  │  5  …
    row 0         ·    ·   the  cat  sat │ on  …       · is padding
    row 1         in   the  be  gin ning │ was …
    positions     0    0    0    1    2  │  3  …       of row 0
                  0    1    2    3    4  │  5  …       of row 1

Every row gets the same result as if it were computed separately. Its positions count from its own
first token, and the padding before it is masked, because the rule of `scores_bias` holds here too:
a token at position p attends to itself and the p tokens before it. A padding token attends only to
itself, and its result is not used.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from weakref import proxy

import torch
from torch import Tensor
from torch.nn import functional

from model.mask import Mask, make_mask, scores_bias
from model.positions import Angles, Rotary, rotary_angles
from parallel.context import Attend


class KeyValueCache:
    """The cache of all layers for a batch of prompts and their continuations.

    Args:
        prompt_lengths: number of tokens of each prompt, [B]. The model first gets all prompts at
            once, padded on the left to the longest, and then one token per row at a time.
        new_tokens: the most tokens that will follow the prompts.
        dtype, device: those of the model's activations.
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        new_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.dtype, self.filled, self.length = dtype, 0, 0
        self.slots = max(prompt_lengths) + new_tokens
        # proxy: in a cycle, memory would wait for the garbage collector
        self.layers: dict[str, LayerCache] = defaultdict(partial(LayerCache, proxy(self)))
        self._has_padding = len(set(prompt_lengths)) > 1
        padding = max(prompt_lengths) - torch.tensor(prompt_lengths, device=device)  # [B]
        slots = torch.arange(self.slots, device=device).unsqueeze(1)
        self._positions = (slots - padding).clamp(min=0)  # [slots, B]
        self._angles: dict[Rotary, Angles] = {}
        self._attend: dict[tuple[int | None, int], Attend] = {}  # for the current tokens

    def next(self, length: int) -> None:
        """Advances to the next `length` tokens."""
        self.filled, self.length = self.filled + self.length, length
        self._attend.clear()
        assert length == 1 or self.filled == 0, "prompts come first and at once, then single tokens"

    def angles(self, rotary: Rotary) -> Angles:
        """The angles of the current tokens."""
        if rotary not in self._angles:
            self._angles[rotary] = rotary_angles(self._positions, rotary, self.dtype)
        return Angles(*(each[self._current()] for each in self._angles[rotary]))

    def attend(self, window: int | None, head_dim: int) -> Attend:
        """The attention among the tokens of the prompts, or of one token to all earlier ones."""
        key = window, head_dim
        if key not in self._attend:
            positions = self._positions[self._current()]
            if self.length > 1 and not self._has_padding:
                self._attend[key] = make_mask(positions, None, window, self.dtype, head_dim)
            else:
                bias = None
                if self._has_padding or window is not None:  # else it sees all
                    bias = scores_bias(positions, self.dtype, window, self.filled)
                one = partial(attend_last, bias=bias)
                self._attend[key] = one if self.length == 1 else Mask(bias=bias)
        return self._attend[key]

    def _current(self) -> slice:
        return slice(self.filled, self.filled + self.length)


class LayerCache:
    """One layer's keys, with rotary embedding applied, and values, each [slots, B, heads, E], for
    this tp rank's key/value heads: 2 · slots · B · heads · E numbers. Its attention sees the
    interface that `Positions` has in training (model/positions.py)."""

    def __init__(self, whole: KeyValueCache) -> None:
        self.whole, self.filled = whole, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k and v [S, B, heads, E] of the next S tokens; returns those of all tokens so far
        as views [filled, B, heads, E]."""
        if self.keys is None or self.values is None:
            self.keys = k.new_empty((self.whole.slots, *k.shape[1:]))
            self.values = v.new_empty((self.whole.slots, *v.shape[1:]))
        begin, self.filled = self.filled, self.filled + k.shape[0]
        self.keys[begin : self.filled] = k
        self.values[begin : self.filled] = v
        return self.keys[: self.filled], self.values[: self.filled]

    def angles(self, rotary: Rotary) -> Angles:
        return self.whole.angles(rotary)

    def mask(self, window: int | None, head_dim: int, kernel: str) -> Attend:
        # The kernel that trains may not take prompts, whose lengths differ: "auto" is used.
        attend = self.whole.attend(window, head_dim)
        return lambda q, k, v: attend(q, *self.append(k, v))


def attend_last(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of the last token's queries [1, B, H, E] to the keys and values [S, B, K, E] of all
    tokens → [1, B, H, E]; `bias` [B, 1, 1, S] is added to the scores.

    The H/K queries of a key/value head are the rows of one matrix product: no head is repeated, and
    the keys, whose reading dominates the time, are read once.
    """
    rows = q.reshape(q.shape[1], k.shape[2], -1, q.shape[3])  # [B, K, H/K, E]
    k, v = k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)  # [B, K, S, E]
    return functional.scaled_dot_product_attention(rows, k, v, attn_mask=bias).reshape(q.shape)
