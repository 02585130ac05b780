"""The reference of model/router/softmax_renormalised.py."""

from torch import Tensor

from proofs.parity import reference_softmax


class Router(reference_softmax.Router):
    def weigh(self, logits: Tensor, is_chosen: Tensor) -> Tensor:
        weights = self.scores(logits) * is_chosen
        return weights / weights.sum(1, keepdim=True)
