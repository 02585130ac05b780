"""The settings of a mixture of experts (model/feed_forward/experts.py). Its router, the balance of
load, the planner and the metrics read them too, without importing its layers."""

from typing import Annotated

from declare import FREE, Width, between, section
from errors import UserError


@section("model.experts")
class Experts:
    """Of the feed-forward that is a mixture of experts."""

    count: Annotated[int, between(0, 2**16, example=8)] = 0  # X: experts of a layer; 0: not given
    per_token: Annotated[int, between(1, 2**16)] = 1  # k: how many of them each token goes to
    ffn_dim: Width | None = None  # inner width of each expert; null: model.ffn_dim
    # experts to which every token goes, as one feed-forward of their width together
    num_shared: Annotated[int, between(0, 2**10)] = 0
    num_dense_layers: Annotated[int, between(0, 4096)] = 0  # first layers that are swiglu instead
    # of all weights of the router, whichever it is (model/router/_base.py)
    router_scale: Annotated[float, between(1e-6, 1e6, example=2.5)] = 1.0
    # weight of the loss that evens the load of experts in each sequence (model/router/_base.py)
    router_aux_weight: Annotated[float, between(0, 1000, example=1e-2), FREE] = 0.0
    # weight of log² of the sum of exp(logits), which keeps the router's logits small
    router_z_weight: Annotated[float, between(0, 1000, example=1e-3), FREE] = 0.0

    def __post_init__(self) -> None:
        if 0 < self.count < self.per_token:
            why = f"a token would choose more than all {self.count} experts"
            remedy = "give a smaller number, for example 2"
            key = "model.experts.per_token"
            raise UserError(key, self.per_token, why, remedy)

    @property
    def has_router_losses(self) -> bool:
        return self.router_aux_weight > 0 or self.router_z_weight > 0

    def doubts(self) -> list[str]:
        """What a start warns of."""
        if self.per_token < self.count:
            return []
        why = "is all experts: no token leaves one out, so the router chooses nothing"
        return [f"model.experts.per_token={self.count} {why}"]
