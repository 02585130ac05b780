"""The reference of model/feed_forward/experts.py: a plain loop over all experts. Each computes with
the tokens that chose it, whose weights are multiplied with its result."""

import torch
from torch import Tensor, nn

from model import experts
from model.config import ModelConfig
from model.router import sigmoid_bias
from proofs.parity import reference_swiglu
from proofs.parity.reference import reference_of


class Stacked(nn.Module):
    """The matrices of all experts, [X, out, in]."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class FeedForward(nn.Module):
    """Map x [B, S, D] to the same shape."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model, dim, width = model, model.dim, model.expert_width
        self.config = config = model.of(experts.Experts)
        self.router = nn.Linear(dim, config.count, bias=False)
        self.experts = nn.Module()
        self.experts.gate = Stacked(config.count, width, dim)
        self.experts.up = Stacked(config.count, width, dim)
        self.experts.down = Stacked(config.count, dim, width)
        shared = config.num_shared
        self.shared = reference_swiglu.FeedForward(model, shared * width) if shared else None
        self.bias = torch.zeros(config.count)  # float32
        self.losses = torch.zeros(2)  # of the last forward: balance, z
        self.choices = torch.empty(0)  # [B, S, k], ascending

    def forward(self, batch: Tensor) -> Tensor:
        config, x = self.config, batch.flatten(0, 1)  # [T, D]
        logits = self.router(x)  # [T, X]
        router = reference_of("model.router", self.model.router)(self.model)
        preferred = router.preferences(logits, self.bias)
        probabilities = router.probabilities(logits)
        ranks = preferred.detach().argsort(dim=1, descending=True, stable=True).argsort(1)
        is_chosen = ranks < config.per_token
        weights = router.weigh(logits, is_chosen)
        y = torch.zeros_like(x)
        for e in range(config.count):
            mine = is_chosen[:, e].nonzero().flatten()
            rows = x[mine]
            gate = rows @ self.experts.gate.weight[e].t()
            h = gate * torch.sigmoid(gate) * (rows @ self.experts.up.weight[e].t())
            result = h @ self.experts.down.weight[e].t()
            y = y.index_add(0, mine, result * (config.router_scale * weights[mine, e, None]))
        if self.shared is not None:
            y = y + self.shared(x)

        by_sequence = is_chosen.unflatten(0, batch.shape[:2])  # [B, S, X]
        share = by_sequence.double().mean(1) * config.count / config.per_token
        mean = probabilities.unflatten(0, batch.shape[:2]).mean(1)
        z = torch.logsumexp(logits, 1).square().mean()
        balance = (share * mean).sum(1).mean()
        self.losses = torch.stack([config.router_aux_weight * balance, config.router_z_weight * z])
        self.choices = by_sequence.nonzero()[:, 2].view(*batch.shape[:2], config.per_token)
        return y.view_as(batch)

    def update_bias(self) -> None:
        if self.model.router != "sigmoid_bias":
            return
        counts = torch.bincount(self.choices.flatten(), minlength=self.config.count).double()
        below = torch.sign(counts.mean() - counts).float()
        rate = self.model.of(sigmoid_bias.Settings).bias_rate
        self.bias = self.bias + torch.tensor(rate) * below


def experts_of(model: nn.Module) -> list[FeedForward]:
    return [module for module in model.modules() if isinstance(module, FeedForward)]


def auxiliary_losses(model: nn.Module) -> Tensor:
    """The balance loss and the z-loss of the last forward, summed over layers: [2]."""
    return sum((layer.losses for layer in experts_of(model)), torch.zeros(2))
