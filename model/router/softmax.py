"""Probabilities of all experts, of which the chosen ones are the weights: they add up to less than
1 (Switch Transformer: Fedus et al. 2021, https://arxiv.org/abs/2101.03961; OLMoE)."""

from torch import Tensor

from model.router._base import BaseRouter


class Router(BaseRouter):
    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def weigh(self, logits: Tensor, chosen: Tensor) -> Tensor:
        return self.probabilities(logits).gather(1, chosen)
