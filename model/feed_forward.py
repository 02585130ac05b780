"""Gated feed-forward, SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202), inner width cut over
tp."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from model.config import ModelConfig
from model.kernels.swiglu import swiglu
from parallel.parameter import Normal
from parallel.tensor import ColumnParallelLinear, RowParallelLinear, column_parallel


class FeedForward(nn.Module):
    """x [S/tp, B, D] → down(silu(gate(x)) · up(x)) [S/tp, B, D]; gate and up stay two weights, so
    that a tp slice of each is a true slice of the global tensor (a fused [gate; up] cut in two
    would put all of gate on one rank)."""

    def __init__(self, config: ModelConfig, tp: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        self.kernels = config.kernels
        self.group, self.sequence_parallel = tp.get_group(), sequence_parallel
        self.gate = ColumnParallelLinear(config.dim, config.ffn_dim, tp, Normal(config.init_std))
        self.up = ColumnParallelLinear(config.dim, config.ffn_dim, tp, Normal(config.init_std))
        self.down = RowParallelLinear(
            config.ffn_dim, config.dim, tp, sequence_parallel, Normal(config.residual_init_std)
        )

    def forward(self, x: Tensor) -> Tensor:
        # [S, B, F/tp] each
        gate, up = column_parallel(x, [self.gate, self.up], self.group, self.sequence_parallel)
        return self.down(swiglu(gate, up, self.kernels))
