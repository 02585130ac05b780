"""Sigmoid scores, chosen with a bias that keeps the experts' load even. The bias decides which
experts are chosen and is no part of the weights; it is no weight of the model either, but follows
the counts of each step (training/balance.py). So the load is balanced without a loss that disturbs
the gradient (Wang et al. 2024, https://arxiv.org/abs/2408.15664; DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 2.1.2).

Sigmoids are divided by their sum as logarithms, softmax(log σ): they themselves are all 0 in
float32 where the logits are below -104."""

from torch import Tensor
from torch.nn.functional import logsigmoid

from model.router._base import BaseRouter


class Router(BaseRouter):
    has_bias = True
    renormalises = True

    def preferences(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.bias is None else logits.sigmoid() + self.bias

    def probabilities(self, logits: Tensor) -> Tensor:
        return logsigmoid(logits).softmax(-1)

    def weigh(self, logits: Tensor, chosen: Tensor) -> Tensor:
        return logsigmoid(logits.gather(1, chosen)).softmax(-1)
