"""Attention with a mask: which keys each query sees, for all kinds of attention.

The queries are a part of the sequence (all of it, or a chunk of context parallelism), and the keys
are all that precede the part's end.

| a token sees itself and        | Mask                   | computed by                            |
|--------------------------------|------------------------|----------------------------------------|
| all tokens before it           | Mask()                 | `dense`, causal; for a chunk as below  |
| of these, only tokens of its   | Mask(documents=…,      | flash attention, which skips the       |
| document, or the nearest few   |      window=…)         | others                                 |
| the same, without flash att.   | Mask(bias=…)           | `dense`, with a bias                   |

kernels/attention_choice.py chooses the kernel: `dense`, or flash attention.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from model.documents import Documents
from model.kernels.attention import ON_CPU, Dense, by_varlen
from model.kernels.attention_choice import Call, choose, device_of, made_ready


@dataclass(frozen=True)
class Mask:
    """A mask: one row of the table."""

    packed: bool = False  # computed by flash attention: sequences, or documents, packed into one
    documents: Documents | None = None  # None: each sequence is one
    window: int | None = None  # keys that a query sees, itself included
    bias: Tensor | None = None  # [B or 1, 1, queries, keys], 0 where a query sees a key, else −∞
    dense: Dense = ON_CPU.run  # computes the masks that are not packed
    positions: Tensor | None = None  # of the queries in their documents, [S', B or 1]
    first: int = 0  # where the first query is in the sequence

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map q [S', B, H, E], k and v [S, B, K, E] to [S', B, H, E]: S' queries are the last of S
        positions."""
        if self.packed:
            return by_varlen(q, k, v, self.documents, self.window)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [B, heads, S, E]
        return self.dense(q, k, v, self.bias).permute(2, 0, 1, 3)


def make_mask(
    positions: Tensor,
    documents: Documents | None,
    window: int | None,
    dtype: torch.dtype,
    head_dim: int,
    kernel: str = "auto",
    part: range | None = None,
    deterministic: bool = False,
) -> Mask:
    """Create the mask of one micro-batch, and choose the kernel that computes it.

    Args:
        positions: [S', B] int64 of the queries, counted from the start of each document; [S', 1] if
            all sequences have the same positions.
        documents: those of the queries (documents.py); None: each sequence is one document.
        window: as in `Mask`; None: no limit.
        dtype, head_dim: those of queries, keys and values.
        kernel: `model.attention_kernel`.
        part: the positions of the queries in the sequence; None: they are the sequence.
        deterministic: backward must give the same bits every time.
    """
    part = range(positions.shape[0]) if part is None else part
    length = part.stop
    if window is not None and window >= length:
        window = None
    packed = documents is not None or window is not None or part.start > 0
    call = Call(dtype, head_dim, length, packed, deterministic)
    chosen = made_ready(choose(device_of(positions), call, kernel))
    packs, bias = packed and chosen.packs, None
    if packed and not packs:
        bias = scores_bias(positions, dtype, window, part.start)
    return Mask(packs, documents, window, bias, chosen.run, positions, part.start)


def scores_bias(
    positions: Tensor, dtype: torch.dtype, window: int | None = None, first: int = 0
) -> Tensor:
    """The bias [B, 1, S', S] in `dtype` that is added to the scores: 0 where the query (third
    dimension) sees the key (fourth), −∞ elsewhere. The queries are the last S' of S positions, from
    position `first` on.

    It follows from `positions` [S', B]: at position p a token sees itself and the p tokens before
    it, or the nearest `window` of these. It is not a boolean mask, because torch converts such a
    mask to a bias again in each layer, and keeps that for backward.
    """
    index = torch.arange(first + positions.shape[0], dtype=torch.int32, device=positions.device)
    distance = index[first:].unsqueeze(1) - index  # [S', S], how far the key is behind the query
    seen = positions if window is None else positions.clamp(max=window - 1)
    hidden = (distance < 0) | (distance > seen.T.unsqueeze(-1))  # [B, S', S]
    bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return bias.masked_fill_(hidden, -math.inf).unsqueeze(1)
