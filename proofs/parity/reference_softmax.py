"""The reference of model/router/softmax.py."""

import torch
from torch import Tensor

from model.config import ModelConfig


class Router:
    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def preferences(self, logits: Tensor, bias: Tensor) -> Tensor:
        """By which a token chooses: logits [T, X], bias [X] → [T, X]."""
        return logits

    def scores(self, logits: Tensor) -> Tensor:
        """Not normalised."""
        return torch.exp(logits - logits.max(1, keepdim=True).values)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of all experts, for the balance loss."""
        scores = self.scores(logits)
        return scores / scores.sum(1, keepdim=True)

    def weigh(self, logits: Tensor, is_chosen: Tensor) -> Tensor:
        """The experts' weights, 0 for those that the token did not choose: [T, X]."""
        return self.probabilities(logits) * is_chosen
