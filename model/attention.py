"""Causal grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245), heads cut
over tp."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.varlen import varlen_attn

from model.cache import LayerCache
from model.config import ModelConfig
from model.kernels.rotary import rotate
from model.norm import RMSNorm
from parallel.parameter import Normal
from parallel.tensor import ColumnParallelLinear, RowParallelLinear, column_parallel


class Attention(nn.Module):
    """x [S/tp, B, D] → [S/tp, B, D] (without sequence parallelism S instead of S/tp).

    Each tp rank has H/tp query heads and the key/value heads they use: K/tp of them, or, where K <
    tp, one that it shares with tp/K − 1 other ranks. Between the two communications everything is
    local.
    """

    def __init__(self, config: ModelConfig, tp: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel = tp.get_group(), sequence_parallel
        self.head_dim, self.kernels = config.head_dim, config.kernels
        q_dim, kv_dim = config.attention_width, config.num_kv_heads * config.head_dim
        initial = Normal(config.init_std)
        self.query = ColumnParallelLinear(config.dim, q_dim, tp, initial)
        self.key = ColumnParallelLinear(config.dim, kv_dim, tp, initial, shards=config.num_kv_heads)
        self.value = ColumnParallelLinear(
            config.dim, kv_dim, tp, initial, shards=config.num_kv_heads
        )
        self.output = RowParallelLinear(
            q_dim, config.dim, tp, sequence_parallel, Normal(config.residual_init_std)
        )
        # One weight for all heads, of which each tp rank has some.
        self.query_norm = (
            RMSNorm(config, config.head_dim, tp, gradient_is_partial=True)
            if config.qk_norm
            else None
        )
        self.key_norm = (
            RMSNorm(config, config.head_dim, tp, gradient_is_partial=True)
            if config.qk_norm
            else None
        )

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """`documents`: see `attend`. With a `cache` x follows on the tokens in it, and is added to
        them."""
        layers = [self.query, self.key, self.value]
        # [S, B, H/tp·E], [S, B, K/tp·E] twice
        q, k, v = column_parallel(x, layers, self.group, self.sequence_parallel)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))  # [S, B, heads, E]
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = rotate(q, k, cos, sin, self.kernels)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.output(attend(q, k, v, documents).flatten(-2))  # [S, B, H/tp·E] → [S/tp, B, D]


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """Causal attention: q [S, B, H, E], k and v [S, B, K, E] → [S, B, H, E].

    `documents` (model/document.py): None, all of a sequence is one; boundaries [N + 1] int32; or a
    mask [B, 1, S, S]. A single query may follow on more keys and values than its own
    (`attend_last`).
    """
    if documents is not None and documents.dtype == torch.int32:
        return attend_packed(q, k, v, documents)
    if q.shape[0] == 1:
        return attend_last(q, k, v, documents)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [B, heads, S, E]
    shared = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=documents, is_causal=documents is None, enable_gqa=shared
    )
    return y.permute(2, 0, 1, 3)


def attend_last(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The last token's queries [1, B, H, E] on keys and values [S, B, K, E] of all → [1, B, H, E];
    `mask` [B, 1, 1, S].

    Nothing lies ahead of it, so nothing is causal, and the H/K queries of a key/value head are the
    rows of one product: no head is repeated, and the keys, which are what costs time here, are read
    once.
    """
    rows = q.reshape(q.shape[1], k.shape[2], -1, q.shape[3])  # [B, K, H/K, E]
    k, v = k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)  # [B, K, S, E]
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask).reshape(q.shape)


# torch 2.11 has no such argument and takes fewer key/value heads as they are; later versions want
# to be told.
_SHARED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor) -> Tensor:
    """The same by flash attention, which skips what is outside a document; N + 1 `boundaries`, the
    last of them T = B·S.

    The longest document's length is needed on the host: S is never too short, and the same number
    in every micro-batch.
    """
    length, batch = q.shape[:2]
    # [T, heads, E], sequence after sequence; views if B is 1
    q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
    causal = (-1, 0)  # keys from any distance behind the query to none ahead of it
    y = varlen_attn(
        q, k, v, boundaries, boundaries, length, length, window_size=causal, **_SHARED_HEADS
    )
    assert isinstance(y, Tensor)  # alone, for no auxiliary output was asked for
    return y.unflatten(0, (batch, length)).transpose(0, 1)
