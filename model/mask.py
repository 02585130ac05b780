"""Attention with a mask: which keys each query sees, for all kinds of attention.

| a token sees itself and        | Mask                  | computed by                             |
|--------------------------------|-----------------------|-----------------------------------------|
| all tokens before it           | Mask()                | `dense`, causal                         |
| of these, only tokens of its   | Mask(boundaries=…,    | flash attention, which skips the others |
| document, or the nearest few   |      window=…)        |                                         |
| (the same, elsewhere)          | Mask(bias=…)          | `dense`, with a bias [S, S]             |

kernels/attention_choice.py chooses the kernel: `dense`, or flash attention.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from model.kernels.attention import ON_CPU, Dense
from model.kernels.attention_choice import Call, choose, device_of, made_ready

# q [S, B, H, E], k and v [S, B, K, E] → [S, B, H, E]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# torch 2.11 lacks this argument and accepts fewer key/value heads without it; later versions
# require it.
_SHARED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


@dataclass(frozen=True)
class Mask:
    """A mask: one row of the table."""

    boundaries: Tensor | None = None  # [N + 1] int32: where each of N documents begins, and B·S
    window: int | None = None  # keys that a query sees, itself included
    bias: Tensor | None = None  # or this: [B or 1, 1, S, S], 0 where a query sees a key, else −∞
    dense: Dense = ON_CPU.run  # computes the masks without boundaries and window

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map q [S, B, H, E], k and v [S, B, K, E] to [S, B, H, E]."""
        if self.boundaries is not None or self.window is not None:
            return self._packed(q, k, v)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [B, heads, S, E]
        return self.dense(q, k, v, self.bias).permute(2, 0, 1, 3)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, batch = q.shape[:2]
        bounds = self.boundaries
        if bounds is None:  # each sequence is one document
            bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
        # [T, heads, E], sequence after sequence; views if B is 1
        q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
        sees = (-1 if self.window is None else self.window - 1, 0)  # keys behind, keys ahead
        # The length of the longest document is needed on the host. S is an upper bound, and is the
        # same in every micro-batch.
        y = varlen_attn(q, k, v, bounds, bounds, length, length, window_size=sees, **_SHARED_HEADS)
        assert isinstance(y, Tensor)  # no auxiliary output was requested
        return y.unflatten(0, (batch, length)).transpose(0, 1)


def make_mask(
    positions: Tensor,
    boundaries: Tensor | None,
    window: int | None,
    dtype: torch.dtype,
    head_dim: int,
    kernel: str = "auto",
) -> Mask:
    """Create the mask of one micro-batch, and choose the kernel that computes it.

    Args:
        positions: [S, B] int64, counted from the start of each document; [S, 1] if all sequences
            have the same positions.
        boundaries: those of documents (documents.py); None: each sequence is one document.
        window: as in `Mask`; None: no limit.
        dtype, head_dim: those of queries, keys and values.
        kernel: `model.attention_kernel`.
    """
    length = positions.shape[0]
    if window is not None and window >= length:
        window = None
    packed = boundaries is not None or window is not None
    deterministic = torch.are_deterministic_algorithms_enabled()
    call = Call(dtype, head_dim, head_dim, length, packed, deterministic)
    chosen = made_ready(choose(device_of(positions), call, kernel))
    if not packed:
        return Mask(dense=chosen.run)
    if chosen.packs:
        return Mask(boundaries=boundaries, window=window)
    return Mask(bias=scores_bias(positions, dtype, window), dense=chosen.run)


def scores_bias(positions: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """The bias [B, 1, S, S] in `dtype` that is added to the scores: 0 where the query (third
    dimension) sees the key (fourth), −∞ elsewhere.

    It follows from `positions` [S, B]: at position p a token sees itself and the p tokens before
    it, or the nearest `window` of these. It is not a boolean mask, because torch converts such a
    mask to a bias again in each layer, and keeps that for backward.
    """
    index = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
    distance = index.unsqueeze(1) - index  # [S, S], how far the key is behind the query
    seen = positions if window is None else positions.clamp(max=window - 1)
    hidden = (distance < 0) | (distance > seen.T.unsqueeze(-1))  # [B, S, S]
    bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return bias.masked_fill_(hidden, -math.inf).unsqueeze(1)
