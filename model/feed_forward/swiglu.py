"""Gated feed-forward, SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202), with the inner width
sharded over tp."""

from torch import Tensor, nn

from model.config import ModelConfig
from model.kernels.swiglu import swiglu
from model.matmul import Matmul
from parallel.expert import ExpertParallel
from parallel.layer import Atoms, TensorParallel
from parallel.parameter import Normal
from parallel.tensor import ColumnParallelLinear, RowParallelLinear, column_parallel


class FeedForward(nn.Module):
    """Map x [S/tp, B, D] to down(silu(gate(x)) · up(x)) [S/tp, B, D].

    gate and up are separate weights, so that a tp slice of each is a true slice of the global
    tensor (a fused [gate; up], split in two, would put all of gate on one rank).

    inner: the width F; None: `ffn_dim`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        ep: ExpertParallel,
        inner: Atoms | None = None,
    ) -> None:
        super().__init__()
        self.kernels = config.kernels
        inner = inner or Atoms(config.ffn_dim, "model.ffn_dim")
        dim, width = config.dim, inner.count
        std, last_std = Normal(config.init_std), Normal(config.residual_init_std)
        self.gate = ColumnParallelLinear(dim, width, inner, tp, Matmul(), std)
        self.up = ColumnParallelLinear(dim, width, inner, tp, Matmul(), std)
        self.down = RowParallelLinear(width, dim, tp, Matmul(), last_std)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = column_parallel(x, self.gate, self.up)  # [S, B, F/tp] each
        return self.down(swiglu(gate, up, self.kernels))
