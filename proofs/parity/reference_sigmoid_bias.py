"""The reference of model/router/sigmoid_bias.py."""

import torch
from torch import Tensor

from model.router.sigmoid_bias import Settings
from proofs.parity import reference_softmax_renormalised


class Router(reference_softmax_renormalised.Router):
    keys = (("sigmoid_bias", Settings(bias_rate=0.01)),)

    def preferences(self, logits: Tensor, bias: Tensor) -> Tensor:
        return self.scores(logits) + bias

    def scores(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits)
