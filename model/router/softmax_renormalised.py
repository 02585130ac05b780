"""Probabilities of the chosen experts among themselves: the weights add up to 1 (Mixtral: Jiang et
al. 2024, https://arxiv.org/abs/2401.04088, section 2.1; Qwen3)."""

from torch import Tensor

from model.router._base import BaseRouter


class Router(BaseRouter):
    renormalises = True

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def weigh(self, logits: Tensor, chosen: Tensor) -> Tensor:
        return logits.gather(1, chosen).softmax(-1)
