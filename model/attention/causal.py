"""Causal grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245), with
heads sharded over tp."""

from torch import Tensor

from errors import UserError
from model.attention import BaseAttention
from model.config import ModelConfig
from model.kernels.norm_rotary import norm_rotate
from model.kernels.rotary import rotate
from model.matmul import Matmul
from model.norm import RMSNorm
from model.positions import Angles, Positions, Rotary
from parallel.context import Attend
from parallel.layer import Atoms, TensorParallel
from parallel.parameter import Normal
from parallel.tensor import ColumnParallelLinear, RowParallelLinear, column_parallel


class Attention(BaseAttention):
    """Map x [S/tp, B, D] to [S/tp, B, D] (without sequence parallelism S instead of S/tp).

    Each tp rank has H/tp query heads and the key/value heads that they use: K/tp of them or, if
    K < tp, one that it shares with tp/K − 1 other ranks. Between the communication at the input and
    that at the output, everything is local.
    """

    window: int | None = None  # keys that a query sees, itself included; None: all before it

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        dim, head_dim, kernels = config.dim, config.head_dim, config.kernels
        q_dim, kv_dim = config.attention_width, config.num_kv_heads * head_dim
        heads = Atoms(config.num_heads, "model.num_heads")
        kv_heads = Atoms(config.num_kv_heads, "model.num_kv_heads", can_share=True)
        std, last_std = Normal(config.init_std), Normal(config.residual_init_std)

        self.local_heads = len(heads.of(tp.size, tp.rank))
        self.shares_keys = config.num_kv_heads < config.num_heads
        self.head_dim, self.kernels, self.kernel = head_dim, kernels, config.attention_kernel
        self.rotary = Rotary(head_dim, config.rope_theta, config.rope_scaling)
        self.query = ColumnParallelLinear(dim, q_dim, heads, tp, Matmul(), std)
        self.key = ColumnParallelLinear(dim, kv_dim, kv_heads, tp, Matmul(), std)
        self.value = ColumnParallelLinear(dim, kv_dim, kv_heads, tp, Matmul(), std)
        self.output = RowParallelLinear(q_dim, dim, tp, Matmul(), last_std)
        self.query_norm = self.key_norm = None
        if config.qk_norm:  # one weight for all heads; each tp rank has some of the heads
            self.query_norm = RMSNorm(config, head_dim, tp, gradient_is_partial=True)
            self.key_norm = RMSNorm(config, head_dim, tp, gradient_is_partial=True)

    def inputs(self, positions: Positions) -> tuple[Angles, Attend]:
        """The inputs of `forward` besides x."""
        mask = positions.mask(self.window, self.head_dim, self.kernel)
        return positions.angles(self.rotary), self.watched(mask)

    def project(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = column_parallel(x, self.query, self.key, self.value)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))  # [S, B, heads, E]
        if self.query_norm is None or self.key_norm is None:
            return *rotate(q, k, *angles, self.kernels), v
        norms = [(n.local_weight(), n.gradient) for n in (self.query_norm, self.key_norm)]
        return *norm_rotate(q, k, norms, self.query_norm.eps, *angles, self.kernels), v

    def combine(self, y: Tensor) -> Tensor:
        return self.output(y.flatten(-2))

    def rows_of_heads(self) -> dict[str, list[tuple[int, float]]]:
        if self.query_norm is not None:
            why = "the norms bound the logits, and undo what is done to rows before them"
            raise UserError("model.qk_norm", True, why, "set optimizer.muon.qk_clip=0")
        if self.shares_keys:
            return {"query": [(self.head_dim, 1.0)]}
        return {name: [(self.head_dim, 0.5)] for name in ("query", "key")}
