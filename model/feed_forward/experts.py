"""A mixture of experts: each token goes to `experts_per_token` of `num_experts` feed-forwards, and
to all shared ones (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; shared: Dai et al. 2024,
https://arxiv.org/abs/2401.06066, section 3.2)."""

from typing import Any

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.feed_forward import swiglu as dense
from model.kernels.swiglu import swiglu, swiglu_gradients
from model.matmul import GroupedMatmul
from model.router import make_router
from parallel.expert import ExpertParallel, Groups, TokenDispatch
from parallel.expert_linear import ExpertLinear, expert_linear, last_expert_linear
from parallel.layer import Pieces, TensorParallel
from parallel.parameter import Normal


class FeedForward(nn.Module):
    """Map x [S/tp, B, D] to Σ weight · expert(x) over each token's experts, plus shared(x)."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, ep: ExpertParallel) -> None:
        super().__init__()
        self.router = make_router(config, tp, ep)
        self.dispatch = TokenDispatch(ep)
        self.experts = Experts(config, ep)
        self.shared = None
        if config.num_shared_experts:
            width = config.num_shared_experts * config.expert_width
            inner = Pieces(width, "model.num_shared_experts · model.expert_ffn_dim")
            self.shared = dense.FeedForward(config, tp, ep, inner)

    def forward(self, x: Tensor) -> Tensor:
        weights, routes = self.router(x, self.dispatch)
        sent = self.dispatch.send(x.flatten(0, 1), weights, routes)
        shared = None if self.shared is None else self.shared(x)  # while rows travel
        rows, weights = self.dispatch.receive(sent)
        y = self.experts(rows, weights, routes.groups)
        y = self.dispatch.send_back(y, routes).view_as(x)
        return y if shared is None else y + shared


class Experts(nn.Module):
    """The experts of this ep rank: SwiGLU each, with three weights for all of them. FSDP shards
    them as a unit of its own, over another view of the mesh than the rest of the block."""

    def __init__(self, config: ModelConfig, ep: ExpertParallel) -> None:
        super().__init__()
        self.kernels = config.kernels
        count, dim, width = config.num_experts, config.dim, config.expert_width
        std, last_std = Normal(config.init_std), Normal(config.residual_init_std)
        self.gate = ExpertLinear(count, dim, width, ep, GroupedMatmul, std)
        self.up = ExpertLinear(count, dim, width, ep, GroupedMatmul, std)
        self.down = ExpertLinear(count, width, dim, ep, GroupedMatmul, last_std)

    def forward(self, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        """Map rows [R, D], those of each expert together, and the router's weights of them [R] to
        weight · expert(row) [R, D]."""
        gate, up = expert_linear(rows, groups, self.gate, self.up)
        h = WeightedSwiGLU.apply(gate, up, weights, self.kernels)
        return last_expert_linear(h, groups, self.down)


class WeightedSwiGLU(torch.autograd.Function):
    """weight · silu(gate) · up, for gate, up [R, F] and weights [R]. Multiplied here and not after
    the last product, the weight's gradient needs no result of an expert."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor, kernels: str) -> Tensor:
        ctx.save_for_backward(gate, up, weights)
        ctx.kernels = kernels
        # In place: computed in the weights' dtype, written in that of h, without a copy in between.
        return swiglu(gate, up, kernels).mul_(weights.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gate, up, weights = ctx.saved_tensors
        h = swiglu(gate, up, ctx.kernels)
        dweights = (dy.to(weights.dtype) * h).sum(1)
        dh = torch.mul(dy, weights.unsqueeze(1), out=h)  # h is not needed any more
        return *swiglu_gradients(dh, gate, up, ctx.kernels), dweights, None
