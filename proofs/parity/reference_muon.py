"""Muon for one process, from Jordan et al. (https://kellerjordan.github.io/posts/muon) and Liu et
al. (https://arxiv.org/abs/2502.16982), on whole matrices."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from proofs.parity import reference_adamw
from settings.sections import OptimizerConfig


class Muon(torch.optim.Optimizer):
    def __init__(self, weights: list[nn.Parameter], config: OptimizerConfig) -> None:
        super().__init__(weights, {})
        self.own, self.decay = getattr(config, config.name), config.weight_decay

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        mu = self.own.momentum
        for weight in self.param_groups[0]["params"]:
            old = self.state[weight].get("momentum", torch.zeros_like(weight))
            momentum = self.state[weight]["momentum"] = mu * old + (1 - mu) * weight.grad
            ahead = mu * momentum + (1 - mu) * weight.grad
            each = ahead if weight.ndim == 3 else [ahead]  # experts [X, out, in]
            steps = torch.stack([newton_schulz(u) * 0.2 * max(u.shape) ** 0.5 for u in each])
            weight -= self.param_groups[0]["lr"] * (steps.view_as(weight) + self.decay * weight)


def newton_schulz(x: Tensor) -> Tensor:
    x = x / x.square().sum().sqrt()
    for _ in range(5):
        gram = x.T @ x
        x = 3.4445 * x - 4.7750 * (x @ gram) + 2.0315 * (x @ gram @ gram)
    return x


def make(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig
) -> list[torch.optim.Optimizer]:
    hidden = {
        name: p
        for name, p in parameters.items()
        if name.startswith("blocks.") and p.ndim > 1 and "router" not in name
    }
    rest = {name: p for name, p in parameters.items() if name not in hidden}
    return [Muon(list(hidden.values()), config), *reference_adamw.make(rest, config)]
