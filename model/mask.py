"""Attention under a mask: which keys each query sees, said once for all kinds of attention.

| a token sees itself and        | Mask                  | computed by                             |
|--------------------------------|-----------------------|-----------------------------------------|
| all tokens before it           | Mask()                | scaled_dot_product_attention, causal    |
| those of them that are in its  | Mask(boundaries=…,    | flash attention, which skips the others |
| document, or the nearest few   |      window=…)        | (CUDA, 16 bits, heads of up to 256)     |
|                                | Mask(bias=…)          | the first, with a bias of S² scores     |
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

# q [S, B, H, E], k and v [S, B, K, E] → [S, B, H, E]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# torch 2.11 has no such argument and takes fewer key/value heads as they are; later versions want
# to be told.
_SHARED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


@dataclass(frozen=True)
class Mask:
    """One row of the table."""

    boundaries: Tensor | None = None  # [N + 1] int32: where each of N documents begins, and B·S
    window: int | None = None  # keys that a query sees, itself included
    bias: Tensor | None = None  # instead: [B or 1, 1, S, S], 0 where a query sees a key, else −∞

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [S, B, H, E], k and v [S, B, K, E] → [S, B, H, E]."""
        if self.boundaries is not None or self.window is not None:
            return self._packed(q, k, v)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [B, heads, S, E]
        shared, causal = q.shape[1] != k.shape[1], self.bias is None
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.bias, is_causal=causal, enable_gqa=shared
        )
        return y.permute(2, 0, 1, 3)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, batch = q.shape[:2]
        bounds = self.boundaries
        if bounds is None:  # of sequences
            bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
        # [T, heads, E], sequence after sequence; views if B is 1
        q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
        sees = (-1 if self.window is None else self.window - 1, 0)  # keys behind, keys ahead
        # The longest document's length is needed on the host: S is never too short, and the same
        # number in every micro-batch.
        y = varlen_attn(q, k, v, bounds, bounds, length, length, window_size=sees, **_SHARED_HEADS)
        assert isinstance(y, Tensor)  # no auxiliary output was asked for
        return y.unflatten(0, (batch, length)).transpose(0, 1)


def make_mask(
    positions: Tensor,
    boundaries: Tensor | None,
    window: int | None,
    dtype: torch.dtype,
    head_dim: int,
) -> Mask:
    """The mask of one micro-batch.

    Args:
        positions: [S, B] int64, counted from each document's begin; [S, 1]: all sequences alike.
        boundaries: of documents (documents.py); None: each sequence is one.
        window: as in `Mask`; None: everything.
        dtype, head_dim: of queries and keys.
    """
    length = positions.shape[0]
    if window is not None and window >= length:
        window = None
    if boundaries is None and window is None:
        return Mask()
    if flash_takes(positions, dtype, head_dim):
        return Mask(boundaries=boundaries, window=window)
    return Mask(bias=scores_bias(positions, dtype, window))


def flash_takes(positions: Tensor, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether flash attention takes packed sequences of such heads, where `positions` are."""
    fits = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256
    return positions.is_cuda and fits


def scores_bias(positions: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """[B, 1, S, S] in `dtype`, to be added to the scores: 0 where the query (third) sees the key
    (fourth), −∞ elsewhere.

    `positions` [S, B] say it all: at position p a token sees itself and the p tokens before it, or
    the nearest `window` of these. Added and not boolean, since torch makes an added one of a
    boolean mask, again in each layer, and keeps it for backward.
    """
    index = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
    distance = index.unsqueeze(1) - index  # [S, S], how far the key is behind the query
    seen = positions if window is None else positions.clamp(max=window - 1)
    hidden = (distance < 0) | (distance > seen.T.unsqueeze(-1))  # [B, S, S]
    bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return bias.masked_fill_(hidden, -math.inf).unsqueeze(1)
