"""The reference's mixture of experts: a plain loop over all experts, one after another.

Like reference.py, a second implementation from the papers, with nothing but torch. Each expert
computes with the tokens that chose it, whose weights are multiplied with its result.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Routing:
    """A mixture of experts, by its configuration."""

    router: str
    num_experts: int
    chosen: int  # by each token
    width: int
    shared_width: int
    scale: float
    balance: float  # weight of the balance loss
    z: float
    bias_rate: float


class Stacked(nn.Module):
    """The matrices of all experts, [X, out, in]."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class Experts(nn.Module):
    """Map x [B, S, D] to the same shape. `hit` [B', S'] tells which positions of a padded batch
    hold the tokens of `sequences` sequences, in order; None: all."""

    hit: Tensor | None = None
    sequences = 0

    def __init__(self, dim: int, routing: Routing) -> None:
        super().__init__()
        self.routing, count = routing, routing.num_experts
        self.router = nn.Linear(dim, count, bias=False)
        self.experts = nn.Module()
        self.experts.gate = Stacked(count, routing.width, dim)
        self.experts.up = Stacked(count, routing.width, dim)
        self.experts.down = Stacked(count, dim, routing.width)
        self.shared = None
        if routing.shared_width:
            self.shared = nn.Module()
            self.shared.gate = nn.Linear(dim, routing.shared_width, bias=False)
            self.shared.up = nn.Linear(dim, routing.shared_width, bias=False)
            self.shared.down = nn.Linear(routing.shared_width, dim, bias=False)
        self.bias = torch.zeros(count)  # float32
        self.losses: list[Tensor] = []  # of the last forward: balance, z
        self.choices = torch.empty(0)  # [sequences, S, k], ascending

    def forward(self, x: Tensor) -> Tensor:
        if self.hit is None:
            return self.of_tokens(x.flatten(0, 1), len(x)).view_as(x)
        y = torch.zeros_like(x)
        y[self.hit] = self.of_tokens(x[self.hit], self.sequences)
        return y

    def of_tokens(self, x: Tensor, sequences: int) -> Tensor:
        """x [T, D], sequence after sequence."""
        routing, logits = self.routing, self.router(x)  # [T, X]
        if routing.router == "sigmoid_bias":
            scores = torch.sigmoid(logits)
            preferred, probabilities = scores + self.bias, scores / scores.sum(1, keepdim=True)
        else:
            scores = torch.exp(logits - logits.max(1, keepdim=True).values)
            preferred, probabilities = logits, scores / scores.sum(1, keepdim=True)
        ranks = preferred.detach().argsort(dim=1, descending=True, stable=True).argsort(1)
        is_chosen = ranks < routing.chosen
        weights = (probabilities if routing.router == "softmax" else scores) * is_chosen
        if routing.router != "softmax":
            weights = weights / weights.sum(1, keepdim=True)
        y = torch.zeros_like(x)
        for e in range(routing.num_experts):
            mine = is_chosen[:, e].nonzero().flatten()
            rows = x[mine]
            gate = rows @ self.experts.gate.weight[e].t()
            h = gate * torch.sigmoid(gate) * (rows @ self.experts.up.weight[e].t())
            result = h @ self.experts.down.weight[e].t()
            y = y.index_add(0, mine, result * (routing.scale * weights[mine, e, None]))
        if self.shared is not None:
            gate = self.shared.gate(x)
            y = y + self.shared.down(gate * torch.sigmoid(gate) * self.shared.up(x))
        self._account(logits, probabilities, is_chosen, sequences)
        return y

    def _account(
        self, logits: Tensor, probabilities: Tensor, is_chosen: Tensor, sequences: int
    ) -> None:
        routing = self.routing
        by_sequence = is_chosen.unflatten(0, (sequences, -1))  # [B, S, X]
        share = by_sequence.double().mean(1) * routing.num_experts / routing.chosen
        mean = probabilities.unflatten(0, (sequences, -1)).mean(1)
        z = torch.logsumexp(logits, 1).square().mean()
        self.losses = [routing.balance * (share * mean).sum(1).mean(), routing.z * z]
        self.choices = by_sequence.nonzero()[:, 2].view(*by_sequence.shape[:2], routing.chosen)

    @property
    def counts(self) -> Tensor:
        """[X]: how many tokens of the last forward chose each expert."""
        return torch.bincount(self.choices.flatten(), minlength=self.routing.num_experts)

    def update_bias(self) -> None:
        counts = self.counts
        below = torch.sign(counts.double().mean() - counts.double()).float()
        self.bias = self.bias + torch.tensor(self.routing.bias_rate) * below


def experts_of(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def set_padding(model: nn.Module, hit: Tensor | None, sequences: int) -> None:
    for layer in experts_of(model):
        layer.hit, layer.sequences = hit, sequences


def auxiliary_losses(model: nn.Module) -> Tensor:
    """The balance loss and the z-loss of the last forward, summed over layers: [2]."""
    layers = experts_of(model)
    if not layers:
        return torch.zeros(2)
    return torch.stack([torch.stack(each.losses) for each in layers]).sum(0)
