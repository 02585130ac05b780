"""Causal grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245), heads cut over tp."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from model.config import ModelConfig
from model.rotary import rotate
from parallel.tensor import ColumnParallelLinear, RowParallelLinear, column_parallel


class Attention(nn.Module):
    """x [S/tp, B, D] → [S/tp, B, D] (without sequence parallelism S instead of S/tp).

    Each tp rank has H/tp query heads and the key/value heads they use: K/tp of them, or, where K < tp, one that it shares
    with tp/K − 1 other ranks. Between the two communications everything is local.
    """

    def __init__(self, config: ModelConfig, tp: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel = tp.get_group(), sequence_parallel
        self.head_dim = config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.query = ColumnParallelLinear(config.dim, config.dim, tp)
        self.key = ColumnParallelLinear(config.dim, kv_dim, tp, shards=config.num_kv_heads)
        self.value = ColumnParallelLinear(config.dim, kv_dim, tp, shards=config.num_kv_heads)
        self.output = RowParallelLinear(config.dim, config.dim, tp, sequence_parallel)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        layers = [self.query, self.key, self.value]
        q, k, v = column_parallel(x, layers, self.group, self.sequence_parallel)  # [S, B, H/tp·E], [S, B, K/tp·E] twice
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))  # [S, B, heads, E]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [B, heads, S, E]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.output(y.permute(2, 0, 1, 3).flatten(-2))  # [S, B, H/tp·E] → [S/tp, B, D]
