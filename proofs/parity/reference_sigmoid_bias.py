"""The reference of model/router/sigmoid_bias.py."""

import torch
from torch import Tensor

from proofs.parity import reference_softmax_renormalised


class Router(reference_softmax_renormalised.Router):
    def preferences(self, logits: Tensor, bias: Tensor) -> Tensor:
        return self.scores(logits) + bias

    def scores(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits)
