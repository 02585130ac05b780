"""Experts over ranks that all have the same tokens: nothing travels to them, and results are
summed. So text is generated (tools/generate/), where one token cannot be cut over tp.

    4 experts, 2 ranks, each token to 2 experts        (rows: tokens, once for each chosen expert)

    rank 0   tokens a b    its rows  a0 b1   ─ experts 0 and 1 ─┐
    rank 1   tokens a b    its rows  a3 b2   ─ experts 2 and 3 ─┴─ all-reduce ─►  a b on both

All ranks choose alike, because they compute the same scores. In each layer an all-reduce of the
results, T·D numbers, is all that is sent. It has no backward.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

from torch import Tensor

from parallel.collectives import ONE_RANK, all_reduce
from parallel.expert import Exchange, Groups, Routes, Sent, TokenDispatch

T = TypeVar("T")


class ExpertSum(TokenDispatch):
    """Takes the place of `TokenDispatch`. The layer's router must find the routes of one rank with
    all experts, as with `ExpertParallel()`."""

    def once(self, compute: Callable[[], T]) -> T:
        """The result of `compute`; of routes, those to this rank's experts."""
        found = compute()
        return cast(T, self._mine(found)) if isinstance(found, Routes) else found

    def _mine(self, routes: Routes) -> Routes:
        sizes, offsets = routes.groups
        local = len(sizes) // self.ep.size
        experts = slice(self.ep.rank * local, (self.ep.rank + 1) * local)
        before = sum(sizes[: experts.start])
        groups = Groups(sizes[experts], offsets[experts] - before)
        order = routes.order[before : before + sum(groups.sizes)]
        return replace(routes, order=order, groups=groups)

    def send(self, x: Tensor, weights: Tensor, routes: Routes) -> Sent:
        """The rows of x [T, D] and the router's weights of them, of [T, k], for this rank."""
        rows = x.index_select(0, routes.order // weights.shape[1])
        weights = weights.flatten().index_select(0, routes.order)
        return Sent(Exchange(routes, ONE_RANK), rows, weights)

    def receive(self, sent: Sent) -> tuple[Tensor, Tensor]:
        """The rows [R, D] and weights [R] that this rank's experts compute with."""
        return sent.rows, sent.weights

    def send_back(self, y: Tensor, routes: Routes) -> Tensor:
        """Map this rank's results [R, D] to the sum of each token's over all ranks [T, D]."""
        tokens, choices = routes.chosen.shape
        results = y.new_zeros(tokens * choices, y.shape[1]).index_copy_(0, routes.order, y)
        return all_reduce(results.view(tokens, choices, -1).sum(1), self.ep.group)
