"""Experts over ranks that all have the same tokens: nothing travels to them, and results are
summed. So text is generated (tools/generate/), where one token cannot be cut over tp.

    4 experts, 2 ranks, each token to 2 experts        (rows: tokens, once for each chosen expert)

    rank 0   tokens a b    its rows  a0 b1   ─ experts 0 and 1 ─┐
    rank 1   tokens a b    its rows  a3 b2   ─ experts 2 and 3 ─┴─ all-reduce ─►  a b on both

All ranks choose alike, because they compute the same scores. In each layer an all-reduce of the
results, T·D numbers, is all that is sent. It has no backward.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from parallel.collectives import all_reduce
from parallel.dispatch import TokenDispatch, counts_on_host
from parallel.expert import Choice, Received


class Sent(NamedTuple):
    choice: Choice
    order: Tensor  # [R]: this rank's rows, sorted by expert; row i is choice i % k of token i // k
    rows: Tensor
    weights: Tensor
    ends: Tensor  # int32 [X/ep]: of each expert's rows


class Dispatch(TokenDispatch):
    def send(self, x: Tensor, choice: Choice) -> Sent:
        counts = choice.counts.sum(0)
        sizes, local = counts_on_host(counts), len(counts) // self.ep.size
        mine = slice(self.ep.rank * local, (self.ep.rank + 1) * local)
        ends = counts[mine].cumsum(0).to(torch.int32)
        order = choice.experts.flatten().argsort(stable=True)
        order = order[sum(sizes[: mine.start]) :][: sum(sizes[mine])]
        rows = x.index_select(0, order // choice.experts.shape[1])
        return Sent(choice, order, rows, choice.weights.flatten().index_select(0, order), ends)

    def receive(self, sent: Sent) -> Received:
        return Received(sent.rows, sent.weights, sent.ends, leave=lambda _: None)

    def combine(self, y: Tensor, sent: Sent) -> Tensor:
        """Over all ranks."""
        tokens, k = sent.choice.experts.shape
        results = y.new_zeros(tokens * k, y.shape[1]).index_copy_(0, sent.order, y)
        return all_reduce(results.view(tokens, k, -1).sum(1), self.ep.group)
