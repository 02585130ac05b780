"""Four exercises for docs/experts.md: complete the functions, then run `.venv/bin/python -m pytest
docs/exercises/test_experts.py`. Rank r has the experts r · X/ep … (r + 1) · X/ep − 1."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

TOKENS, WIDTH, EXPERTS, K = 6, 3, 8, 2  # of each rank; X


def rows_to_send(chosen: Tensor, num_experts: int, ep: int) -> list[int]:
    """Return how many rows this rank sends to each of the ep ranks.

    chosen: [T, k] int64, the experts of each token.
    """
    raise NotImplementedError("yours to write")


def mixture(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Tensor, group: ProcessGroup
) -> Tensor:
    """Compute Σ weight · (x · expertᵀ) over the experts of each token.

    x: [T, D]. chosen, weights: [T, k]. experts: [X/ep, D, D], those of this rank: an expert is one
    matrix. Returns [T, D]. Use `dist.all_to_all_single` with the sizes of its parts: for the number
    of rows, for the rows, for the expert of each row, and for the results. Other ranks may send
    none. No gradient is needed.
    """
    raise NotImplementedError("yours to write")


def new_bias(bias: Tensor, chosen: Tensor, rate: float, group: ProcessGroup) -> Tensor:
    """Return the bias [X] after a step: `rate` more for each expert with fewer rows than the mean,
    `rate` less for each with more. An expert with exactly the mean keeps its bias.

    chosen: [T, k], the experts of this rank's tokens. All ranks of `group` have different tokens
    and must return the same bias.
    """
    raise NotImplementedError("yours to write")


def balance_loss(probabilities: Tensor, chosen: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's part of the balance loss of one sequence, whose tokens are split over
    `group`: the sum of all ranks' results is Σₑ fₑ · Pₑ.

    probabilities: [T, X] and chosen: [T, k] of this rank's tokens; S = T · ranks. fₑ = X / (k · S)
    · how many of the sequence's tokens chose e, Pₑ = the mean of their probabilities of e.
    """
    raise NotImplementedError("yours to write")


def draw(ranks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, chosen, weights and probabilities, of each rank. No token chooses the last two experts."""
    numbers = torch.Generator().manual_seed(1)
    logits = torch.randn((ranks, TOKENS, EXPERTS), generator=numbers, dtype=torch.float64)
    logits[..., -2:] -= 100
    weights, chosen = logits.softmax(-1).topk(K)
    x = torch.randn((ranks, TOKENS, WIDTH), generator=numbers, dtype=torch.float64)
    return x, chosen, weights, logits.softmax(-1)


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_the_rows_of_each_rank(ep: int) -> None:
    for chosen in draw(4)[1]:
        ranks = [expert * ep // EXPERTS for token in chosen.tolist() for expert in token]
        assert rows_to_send(chosen, EXPERTS, ep) == [ranks.count(rank) for rank in range(ep)]


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_mixture_over_ranks(ranks: Any, ep: int) -> None:
    """With four ranks, the last one has only experts that nobody chose."""
    x, chosen, weights, _ = draw(ep)
    numbers = torch.Generator().manual_seed(2)
    experts = torch.randn((EXPERTS, WIDTH, WIDTH), generator=numbers, dtype=torch.float64)
    found = ranks.run(on_rank, ep, mixture, x, chosen, weights, experts.chunk(ep))
    for rank in range(ep):
        y = torch.einsum("tkij,tj->tki", experts[chosen[rank]], x[rank])
        y = (weights[rank, :, :, None] * y).sum(1)
        torch.testing.assert_close(found[rank], y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_bias(ranks: Any, world: int) -> None:
    chosen, rate = draw(world)[1], 0.1
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    mean = sum(counts) / EXPERTS
    bias = torch.arange(EXPERTS, dtype=torch.float32)
    wanted = bias + torch.tensor([rate * ((n < mean) - (n > mean)) for n in counts])
    for found in ranks.run(on_rank, world, new_bias, [bias] * world, chosen, [rate] * world):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_balance_loss(ranks: Any, world: int) -> None:
    _, chosen, _, probabilities = draw(world)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).double()
    share = counts * EXPERTS / (K * world * TOKENS)
    whole = (share * probabilities.mean((0, 1))).sum()
    found = ranks.run(on_rank, world, balance_loss, probabilities, chosen)
    torch.testing.assert_close(sum(found), whole, rtol=1e-12, atol=1e-12)


def on_rank(function: Callable[..., Tensor], *of_ranks: Any) -> Tensor:
    rank = dist.get_rank()
    return function(*(each[rank] for each in of_ranks), dist.group.WORLD)
