"""A mixture of experts: each token goes to k of X feed-forwards, and to all shared ones (Shazeer et
al. 2017, https://arxiv.org/abs/1701.06538; shared: Dai et al. 2024,
https://arxiv.org/abs/2401.06066, section 3.2)."""

from functools import partial

from torch import Tensor, nn

from model.config import ModelConfig
from model.experts import Experts as Settings
from model.feed_forward import swiglu as dense
from model.kernels.token_rows import spread_rows, sum_rows
from model.kernels.weighted_swiglu import weighted_swiglu
from model.matmul import GroupedMatmul, OneExpert
from model.router import router_class
from parallel.asynchronous import Starts
from parallel.dispatch import RowKernels, make_dispatch
from parallel.expert import ExpertLinear, ExpertParallel, expert_linear, last_expert_linear
from parallel.kept import KeptOutputs
from parallel.layer import Atoms, TensorParallel
from parallel.parameter import Normal
from parallel.weight_gradient import LinearProducts


class FeedForward(nn.Module):
    """Map x [S/tp, B, D] to Σ weight · expert(x) over each token's experts, plus shared(x)."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ep: ExpertParallel) -> None:
        super().__init__()
        kept = KeptOutputs()  # of the choice and the routes at least, for a recomputation
        self.router = router_class(config.router)(config, tp, ep, kept)
        of_rows = (partial(each, kernels=config.kernels) for each in (spread_rows, sum_rows))
        self.dispatch = make_dispatch(ep, kept, RowKernels(*of_rows))
        self.experts = Experts(config, ep)
        self.shared = None
        if number := config.of(Settings).num_shared:
            width = number * config.expert_width
            inner = Atoms(width, "model.experts.num_shared · model.experts.ffn_dim")
            self.shared = dense.FeedForward(config, tp, ep, inner)

    def forward(self, x: Tensor) -> Tensor:
        choice, tokens = self.router(x)
        sent = self.dispatch.send(tokens, choice)
        tokens = tokens.view_as(x)
        shared = None if self.shared is None else self.shared(tokens)  # while rows travel
        y = self.experts(*self.dispatch.receive(sent))
        y = self.dispatch.combine(y, sent).view_as(x)
        return y if shared is None else y + shared


class Experts(nn.Module):
    """The experts of this ep rank: SwiGLU each, with three weights for all of them. FSDP shards
    them as a unit of its own, over another view of the mesh than the rest of the block."""

    def __init__(self, config: ModelConfig, ep: ExpertParallel) -> None:
        super().__init__()
        self.kernels = config.kernels
        count, dim, width = config.of(Settings).count, config.dim, config.expert_width
        std, last_std = Normal(config.init_std), Normal(config.residual_init_std)

        def grouped(ends: Tensor) -> LinearProducts:
            return OneExpert() if len(ends) == 1 else GroupedMatmul(ends, config.kernels)

        self.gate = ExpertLinear(count, dim, width, ep, grouped, std)
        self.up = ExpertLinear(count, dim, width, ep, grouped, std)
        self.down = ExpertLinear(count, width, dim, ep, grouped, last_std)

    def forward(self, rows: Tensor, weights: Tensor, ends: Tensor, leave: Starts) -> Tensor:
        """Map what a rank has `Received` to weight · expert(row) [R, D]."""
        gate, up = expert_linear(rows, ends, leave, self.gate, self.up)
        h = weighted_swiglu(gate, up, weights, self.kernels)
        return last_expert_linear(h, ends, self.down)
