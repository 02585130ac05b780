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

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from model.documents import Documents
from model.kernels.attention import ON_CPU, Dense
from model.kernels.attention_choice import Call, choose, device_of, made_ready

# torch 2.11 lacks this argument and accepts fewer key/value heads without it; later versions
# require it.
_SHARED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)

LOGITS_BYTES = 256 * 2**20  # at once, in `largest_logits`


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
            return self._packed(q, k, v)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [B, heads, S, E]
        return self.dense(q, k, v, self.bias).permute(2, 0, 1, 3)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (length, batch), longest = q.shape[:2], (q.shape[0], k.shape[0])
        if self.documents is None:
            of_q, of_k = (
                torch.arange(0, (batch + 1) * each, each, dtype=torch.int32, device=q.device)
                for each in longest
            )
            first = (0,) * batch
        else:
            of_q, of_k, first, longest = self.documents
        # [T, heads, E], sequence after sequence; views if B is 1
        q = q.transpose(0, 1).flatten(0, 1)
        k, v = (_pack(t, first) for t in (k, v))
        sees = (-1 if self.window is None else self.window - 1, 0)  # keys behind, keys ahead
        # A document's last query is at its last key.
        y = varlen_attn(q, k, v, of_q, of_k, *longest, window_size=sees, **_SHARED_HEADS)
        assert isinstance(y, Tensor)  # no auxiliary output was requested
        return y.unflatten(0, (batch, length)).transpose(0, 1)

    def largest_logits(self, q: Tensor, k: Tensor) -> Tensor:
        """The largest q·k/√E of each head, over the keys that queries see: [H], in the dtype of q.
        q and k are as for a call. Some rows of queries at a time, as all logits are [B, H, S', S].
        """
        assert self.positions is not None
        q, k = (t.permute(1, 2, 0, 3) for t in (q, k))  # [B, heads, S, E]
        q = q / math.sqrt(q.shape[-1])  # before the product: float16 ends at 65,504
        found = q.new_full(q.shape[1:2], -math.inf)
        rows = max(1, LOGITS_BYTES // (q[:, :, 0, 0].nbytes * k.shape[2]))
        for begin in range(0, q.shape[2], rows):
            part, where = q[:, :, begin : begin + rows], self.positions[begin : begin + rows]
            at = self.first + begin
            # none of these queries sees a key before `start`; from `hides` on, some are hidden
            start = 0 if self.window is None else max(0, at + 1 - self.window)
            hides = start if self.documents or self.window else at
            # [B, K, H/K · rows, keys]; `bmm`, of which selective checkpointing keeps no result
            part = part.unflatten(1, (k.shape[1], -1))
            logits = part.flatten(2, 3) @ k[:, :, start : at + len(where)].mT
            logits = logits.unflatten(2, part.shape[2:4])
            bias = scores_bias(where, q.dtype, self.window, at - hides).unsqueeze(1)
            # not added: an infinite logit that is hidden would be nan
            logits[..., hides - start :].masked_fill_(bias < 0, -math.inf)
            found = found.maximum(logits.amax((0, 3, 4)).flatten())
        return found


def _pack(x: Tensor, first: tuple[int, ...]) -> Tensor:
    """Map [S, B, …] to [T, …]: of each sequence b the positions from first[b] on."""
    if any(first):
        parts = [one[start:] for one, start in zip(x.unbind(1), first, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    return x.transpose(0, 1).flatten(0, 1)


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
