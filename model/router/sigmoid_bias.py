"""Sigmoid scores, chosen with a bias that keeps the experts' load even. The bias decides which
experts are chosen and is no part of the weights; it is no weight of the model either, but follows
the counts of each step (training/balance.py). So the load is balanced without a loss that disturbs
the gradient (Wang et al. 2024, https://arxiv.org/abs/2408.15664; DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 2.1.2).

Sigmoids are divided by their sum as logarithms, softmax(log σ): they themselves are all 0 in
float32 where the logits are below -104."""

from typing import Annotated

from torch import Tensor
from torch.nn.functional import logsigmoid

from declare import FREE, between, section
from model.config import ModelConfig
from model.router._base import BaseRouter


@section("model.sigmoid_bias")
class Settings:
    """Of the router whose biases keep the load of experts even."""

    # what is added to an expert's bias after a step in which it had less than its share of tokens,
    # or taken from it (scores are between 0 and 1); 0: the bias stays as it is
    bias_rate: Annotated[float, between(0, 1, example=1e-3), FREE] = 0.0


class Router(BaseRouter):
    has_bias = True
    renormalises = True

    @classmethod
    def bias_rate(cls, config: ModelConfig) -> float:
        return config.of(Settings).bias_rate

    def preferences(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.bias is None else logits.sigmoid() + self.bias

    def probabilities(self, logits: Tensor) -> Tensor:
        return logsigmoid(logits).softmax(-1)

    def weigh(self, logits: Tensor, chosen: Tensor) -> Tensor:
        return logsigmoid(logits.gather(1, chosen)).softmax(-1)
