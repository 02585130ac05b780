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

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from model.config import ModelConfig
from model.experts import Experts
from model.matmul import wide_product
from parallel.collectives import all_reduce
from parallel.expert import Choice, ExpertParallel
from parallel.kept import KeptOutputs
from parallel.layer import Layer, TensorParallel
from parallel.parameter import ROUTER, Normal, WeightSpec
from parallel.weight_gradient import WeightGradient


@dataclass
class Load:
    """What a router has counted in a step, over this rank's tokens."""

    counts: Tensor  # [X] int64: rows of each expert
    losses: Tensor  # [2]: the balance loss and the z-loss, weighted
    global_sequences: int  # in the global batch; losses are divided by this number
    loss_scale: Tensor  # the factor of the gradients of losses (training/guard.py)


class RouterScores(torch.autograd.Function):
    """logits [T, X] = x [T, D] · weightᵀ, in `exact`, as is the weight's gradient; and x for its
    other uses, to whose gradient backward adds. Keeps x in its own dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, exact: torch.dtype, gradient: WeightGradient
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.exact, ctx.gradient = exact, gradient
        return wide_product(x, weight.t(), exact), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dx: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = dy.to(x.dtype)  # as that of every other layer
        dx.addmm_(dy, weight)  # in place: the rows' way back has just made it
        # to the sum itself: autograd would round it to the weight's dtype
        return dx, ctx.gradient.add(wide_product(dy.t(), x, ctx.exact)), None, None


class AddLoss(torch.autograd.Function):
    """x, unchanged. In backward the gradient of `loss`, a scalar, is `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        return dx, ctx.scale, None


class BaseRouter(Layer):
    """Chooses k of X experts for each token, and their weights.

    Its weight [X, D] is whole on every tp rank, which (with sequence parallelism) has different
    tokens: its gradient is a partial sum (parallel/partial.py). `kept` keeps the choice through a
    recomputation, in which tokens are not counted again.
    """

    has_bias = False  # whether `bias` is added to the numbers by which experts are chosen
    renormalises = False  # whether one token's weights add up to the same number

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, ep: ExpertParallel, kept: KeptOutputs
    ) -> None:
        super().__init__(tp)
        self.experts, self.ep, self.kept = config.of(Experts), ep, kept
        self.num_experts, self.k = self.experts.count, self.experts.per_token
        self.bias: Tensor | None = None  # [X] float32
        self.load: Load | None = None
        shape, initial = (self.num_experts, config.dim), Normal(config.init_std)
        weight = WeightSpec(
            shape, Replicate(), initial, ROUTER, gradient_is_partial=tp.sequence_parallel
        )
        self.add_weight(weight)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of every expert, which add up to 1 for each token: [T, X]."""
        raise NotImplementedError

    def weigh(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """The weights [T, k] of the experts `chosen` [T, k], by logits [T, X]."""
        raise NotImplementedError

    @classmethod
    def bias_rate(cls, config: ModelConfig) -> float:
        """How far a step moves an expert's bias towards an even load (training/balance.py)."""
        return 0.0

    def preferences(self, logits: Tensor) -> Tensor:
        """A token chooses the k experts with the largest of these numbers [T, X]."""
        return logits

    def set_bias(self, bias: Tensor) -> None:
        """Prefer experts by `bias` [X] too: on the device of the tokens, and equal on all ranks.
        training/balance.py changes it between steps. Without one it is 0."""
        self.bias = bias.float()

    def start_to_count(self, device: str, exact: torch.dtype, global_sequences: int) -> Load:
        """Count the load of every forward with gradients from now on, with losses in `exact`; and
        if this kind has a bias, make it, of zeros. A training run calls this once."""
        if self.has_bias:
            self.set_bias(torch.zeros(self.num_experts, device=device))
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        losses = torch.zeros(2, dtype=exact, device=device)
        self.load = Load(counts, losses, global_sequences, torch.ones_like(losses[0]))
        return self.load

    def forward(self, x: Tensor) -> tuple[Choice, Tensor]:
        """Map x [S/tp, B, D] to the choice of its T = S/tp · B tokens, and the tokens [T, D]."""
        exact = torch.promote_types(x.dtype, torch.float32)
        weight, tokens = self.local_weight(), x.flatten(0, 1)
        logits, tokens = RouterScores.apply(tokens, weight, exact, self.gradient)
        experts, counts = self.kept.once(lambda: self.choose(logits, x.shape[1]))
        weights = self.weigh(logits, experts) * self.experts.router_scale
        load = self.load
        if load is not None and torch.is_grad_enabled():
            losses = self.losses(logits, counts, load.global_sequences)
            self.kept.once(lambda: self.count(load, counts, losses))
            for loss in losses:
                if loss is not None:
                    weights = AddLoss.apply(weights, loss, load.loss_scale)
        return Choice(experts, weights, counts), tokens

    @torch.no_grad()
    def choose(self, logits: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """The experts that each token prefers [T, k], and the counts of each sequence [B, X]."""
        experts = self.preferences(logits).topk(self.k).indices
        # integers: a sum of ones in any order is the same, and larger than 256 in bfloat16 is not
        of_sequences = experts.view(-1, sequences, self.k).transpose(0, 1).flatten(1)
        counts = experts.new_zeros(sequences, self.num_experts)
        return experts, counts.scatter_add_(1, of_sequences, torch.ones_like(of_sequences))

    def losses(self, logits: Tensor, counts: Tensor, global_sequences: int) -> list[Tensor | None]:
        """The two losses of this rank's tokens, scalars; None: it is switched off."""
        config, balance, z = self.experts, None, None
        length = len(logits) // len(counts) * self.ep.parts  # S
        if config.router_aux_weight > 0:
            # of whole sequences: all-reduces of [B, X] over the ranks that share them
            of_all = self.kept.once(lambda: reduce(all_reduce, self.ep.sequence, counts))
            p = self.probabilities(logits).unflatten(0, (-1, len(counts))).sum(0)  # length · P
            factor = config.router_aux_weight / global_sequences
            factor *= self.num_experts / (self.k * length) / length  # of f, and of P
            balance = factor * (of_all * p).sum()
        if config.router_z_weight:
            squares = logits.logsumexp(-1).square().sum()
            z = config.router_z_weight / (global_sequences * length) * squares
        return [balance, z]

    @torch.no_grad()
    def count(self, load: Load, counts: Tensor, losses: list[Tensor | None]) -> None:
        """Add to the load, once per micro-batch."""
        load.counts += counts.sum(0)
        for total, loss in zip(load.losses, losses, strict=True):
            if loss is not None:
                total.add_(loss)
