"""The next token of each sequence of a batch, from its logits.

    logits ─ the top_k most likely ─ softmax(logits / temperature) ─ the fewest of top_p ─ draw

Each row draws with numbers of its own, a function of (seed, row, step): who else is in the batch
changes nothing.
"""

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from errors import UserError
from parallel.collectives import start_all_gather


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Raises UserError, naming the option, where a number makes no sense."""

    temperature: float = 0.8  # logits are divided by it; 0: always the most likely token
    # Of so many most likely tokens (Fan et al. 2018, https://arxiv.org/abs/1805.04833); 0: of all.
    top_k: int = 0
    # Only among the fewest most likely tokens that together have this probability (nucleus
    # sampling: Holtzman et al. 2019, https://arxiv.org/abs/1904.09751); 1: all.
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            remedy = "give 0 (most likely token) or more"
            raise UserError("--temperature", self.temperature, "is no temperature", remedy)
        if self.top_k < 0:
            why = "is no number of tokens"
            raise UserError("--top-k", self.top_k, why, "give 1 or more, or 0 for all")
        if not 0 < self.top_p <= 1:
            why = "is no probability to keep"
            raise UserError("--top-p", self.top_p, why, "give a number above 0, up to 1 (all)")


def row_numbers(seed: int, rows: range, steps: int) -> Tensor:
    """[steps, B] float64 in [0, 1), on the CPU: what each of `rows` draws with, the same whatever
    other rows there are."""
    columns = []
    for row in rows:
        digest = hashlib.sha256(f"{seed}:{row}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        columns.append(torch.rand(steps, dtype=torch.float64, generator=generator))
    return torch.stack(columns, dim=1)


def draw(logits: Tensor, sampling: Sampling, numbers: Tensor) -> Tensor:
    """logits [B, V], numbers [B] float64 in [0, 1) → tokens [B] int64.

    The number says how far to go through the cumulative probabilities of the tokens that may be
    drawn. In float64: in float32 the sum over a large vocabulary is off by more than a rare token's
    probability.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    # [B, candidates], most likely first; None: the whole vocabulary, as it is
    candidates: Tensor | None = None
    if 0 < sampling.top_k < logits.shape[-1]:
        logits, candidates = logits.topk(sampling.top_k)
    elif sampling.top_p < 1:
        logits, candidates = logits.sort(descending=True)
    logits = logits.double()
    probabilities = ((logits - logits.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        # of the more likely ones; 0 for the first, which always stays
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0)
    cumulative = probabilities.cumsum(-1)
    # [B, 1]: the first whose cumulative probability exceeds the number, never one of probability 0.
    places = torch.searchsorted(cumulative, numbers.unsqueeze(1) * cumulative[:, -1:], right=True)
    return (places if candidates is None else candidates.gather(1, places)).squeeze(1)


def draw_over_tp(
    logits: Tensor, vocab_size: int, sampling: Sampling, numbers: Tensor, group: ProcessGroup
) -> Tensor:
    """Each tp rank's logits [B, V/tp] → tokens [B], the same on all ranks.

    All-gather over tp: B·⌈V/tp⌉ numbers of each rank; the last ones have fewer, and pad theirs for
    the way. Then all draw, and take what the first has drawn (broadcast over tp: B numbers). For on
    a GPU a cumulative sum need not be the same bits twice, and ranks that go on with different
    tokens would compute nonsense, unseen.
    """
    if group.size() == 1:
        return draw(logits, sampling, numbers)
    width = -(-vocab_size // group.size())
    parts = functional.pad(logits.T, (0, 0, 0, width - logits.shape[1]))  # [⌈V/tp⌉, B]
    # [B, V]: what is padded comes last
    whole = start_all_gather(parts, group).wait()[:vocab_size].T
    tokens = draw(whole, sampling, numbers)
    dist.broadcast(tokens, group=group, group_src=0)
    return tokens
