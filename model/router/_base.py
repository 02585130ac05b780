"""What all routers have in common: the scores of experts, the choice, and the losses that keep the
load of experts even.

A token's scores are logits = x · weightᵀ, computed in float32 at least: experts whose scores are
almost equal would otherwise be chosen by rounding errors. (With FSDP in bfloat16, the weight
itself arrives rounded, as all weights do.) A kind of router states which numbers a token
prefers experts by, and which weights it gives to those that it has chosen.

Both losses are sums over the sequences of the global batch, divided by their number. So they depend
neither on how the batch is split over ranks nor on micro-batches:

    router_aux_weight · Σₑ fₑ · Pₑ      fₑ = X / (k·S) · how often the sequence's tokens chose e
                                        Pₑ = the mean of their probabilities of e
    router_z_weight · mean log²(Σₑ exp(logit of e))

(Balance, per sequence: DeepSeek-V3, https://arxiv.org/abs/2412.19437, equations 17 to 20; z: Zoph
et al. 2022, https://arxiv.org/abs/2202.08906, equation 5.) They enter backward where they are
made, whichever pipeline stage that is (`AddLoss`), and are no part of the loss that a run reports.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from model.config import ModelConfig
from model.experts import Experts
from parallel.deferred import WeightGradientQueue, deliver
from parallel.expert import ExpertParallel, Routes, TokenDispatch, find_routes
from parallel.layer import Layer, TensorParallel
from parallel.parameter import MATRIX, Normal, WeightSpec
from parallel.weight_gradient import Destination


@dataclass
class Account:
    """What a router has counted in a step, over this rank's tokens."""

    counts: Tensor  # [X] int64: rows of each expert
    losses: Tensor  # [2]: the balance loss and the z-loss, weighted
    global_sequences: int  # in the global batch


class RouterScores(torch.autograd.Function):
    """logits [T, X] = x [T, D] · weightᵀ, in `exact`, as is the weight's gradient. Keeps x in its
    own dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        exact: torch.dtype,
        queue: WeightGradientQueue | None,
        destination: Destination,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.exact, ctx.queue, ctx.destination = exact, queue, destination
        return x.to(exact) @ weight.to(exact).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = (dy @ weight.to(ctx.exact)).to(x.dtype)
        # to the sum itself: autograd would round it to the weight's dtype
        dw = deliver(dy.t() @ x.to(ctx.exact), ctx.queue, ctx.destination)
        return dx, dw, None, None, None


class AddLoss(torch.autograd.Function):
    """x, unchanged. In backward the gradient of `loss`, a scalar, is 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
        return dx, ctx.like


class BaseRouter(Layer):
    """Chooses `experts_per_token` of `num_experts` experts for each token, and their weights.

    Its weight [X, D] is whole on every tp rank, which (with sequence parallelism) has different
    tokens: its gradient is a partial sum (parallel/partial.py).
    """

    has_bias = False  # whether `bias` is added to the numbers by which experts are chosen
    renormalises = False  # whether one token's weights add up to the same number

    def __init__(self, config: ModelConfig, tp: TensorParallel, ep: ExpertParallel) -> None:
        super().__init__(tp)
        self.experts, self.ep = config.of(Experts), ep
        self.num_experts, self.k = self.experts.count, self.experts.per_token
        # [X] float32, equal on all ranks; training/balance.py changes it. None: zeros.
        self.bias: Tensor | None = None
        self.account: Account | None = None  # set in a training run
        weight = WeightSpec(
            shape=(self.num_experts, config.dim),
            placement=Replicate(),
            initial=Normal(config.init_std),
            group=MATRIX,
            gradient_is_partial=tp.sequence_parallel,
        )
        self.add_weight(weight)

    @abstractmethod
    def probabilities(self, logits: Tensor) -> Tensor:
        """Of every expert, which add up to 1 for each token: [T, X]."""

    @abstractmethod
    def weigh(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """The weights [T, k] of the experts `chosen` [T, k], by logits [T, X]."""

    @classmethod
    def bias_rate(cls, config: ModelConfig) -> float:
        """How far a step moves an expert's bias towards an even load (training/balance.py)."""
        return 0.0

    def preferences(self, logits: Tensor) -> Tensor:
        """A token chooses the k experts with the largest of these numbers [T, X]."""
        return logits

    def forward(self, x: Tensor, dispatch: TokenDispatch) -> tuple[Tensor, Routes]:
        """Map x [S/tp, B, D] to each token's weights [T, k] in at least float32, and its routes."""
        exact = torch.promote_types(x.dtype, torch.float32)
        weight, destination = self.local_weight(), self.destination()
        logits = RouterScores.apply(x.flatten(0, 1), weight, exact, self.queue, destination)
        routes = dispatch.once(lambda: self.find(logits, x.shape[1]))
        weights = self.weigh(logits, routes.chosen) * self.experts.router_scale
        if self.account is not None and torch.is_grad_enabled():
            losses = self.losses(logits, routes, self.account.global_sequences)
            dispatch.once(lambda: self.count(self.account, routes, losses))
            if self.experts.has_router_losses:
                weights = AddLoss.apply(weights, losses.sum())
        return weights, routes

    @torch.no_grad()
    def find(self, logits: Tensor, sequences: int) -> Routes:
        """The routes of the experts that each token prefers."""
        chosen = self.preferences(logits).topk(self.k).indices
        whole = self.experts.router_aux_weight > 0
        return find_routes(chosen, sequences, self.num_experts, self.ep, whole)

    def losses(self, logits: Tensor, routes: Routes, global_sequences: int) -> Tensor:
        """The two losses of this rank's tokens, [2]."""
        config, balance, z = self.experts, logits.new_zeros(()), logits.new_zeros(())
        length = len(logits) // len(routes.counts) * self.ep.parts  # S
        if routes.sequence_counts is not None:
            f = routes.sequence_counts.to(logits.dtype) * (self.num_experts / (self.k * length))
            p = self.probabilities(logits).unflatten(0, (-1, len(f))).sum(0) / length  # [B, X]
            balance = config.router_aux_weight / global_sequences * (f * p).sum()
        if config.router_z_weight:
            squares = logits.logsumexp(-1).square().sum()
            z = config.router_z_weight / (global_sequences * length) * squares
        return torch.stack([balance, z])

    @torch.no_grad()
    def count(self, account: Account | None, routes: Routes, losses: Tensor) -> None:
        """Add to the account, once per micro-batch."""
        assert account is not None
        account.counts += routes.counts.sum(0)
        account.losses += losses.detach()
