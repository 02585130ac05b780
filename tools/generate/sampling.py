"""Samples the next token: logits ─ the top_k most likely ─ softmax(logits / temperature) ─ draw."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from model.transformer import Head
from parallel.collectives import start_all_gather
from runtime.agreement import AgreedError
from tools.command import at_least


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. Raises UserError, with the option as key, for an invalid value."""

    temperature: float = 0.8  # logits are divided by it; 0: always the most likely token
    # Sample from this many most likely tokens (Fan et al. 2018, https://arxiv.org/abs/1805.04833);
    # 0: from all.
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(0, temperature=self.temperature, top_k=self.top_k)
        at_least(0, 1 << 63, seed=self.seed)

    def numbers(self, steps: int) -> Tensor:
        """The random number of each step, the same on any device: [steps, 1] float64 in [0, 1)."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(steps, 1, dtype=torch.float64, generator=generator)


def draw(logits: Tensor, sampling: Sampling, numbers: Tensor) -> Tensor:
    """Draws one token per row: logits [B, V], numbers [B] float64 in [0, 1) → tokens [B] int64.

    This is inverse transform sampling: the token at which the cumulative probability exceeds the
    number. It is computed in float64, because in float32 the sum over a large vocabulary has an
    error larger than the probability of a rare token.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    # [B, candidates], most likely first; None: the whole vocabulary, in its order
    candidates: Tensor | None = None
    if sampling.top_k:
        logits, candidates = logits.topk(min(sampling.top_k, logits.shape[-1]))
    logits = logits.double()
    scaled = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    cumulative = scaled.softmax(-1).cumsum(-1)
    # [B, 1]: the first whose cumulative probability exceeds the number, never one of probability 0.
    places = torch.searchsorted(cumulative, numbers.unsqueeze(1) * cumulative[:, -1:], right=True)
    return (places if candidates is None else candidates.gather(1, places)).squeeze(1)


def draw_over_tp(
    logits: Tensor, head: Head, sampling: Sampling, numbers: Tensor, num_tokens: int | None
) -> Tensor:
    """Draws from each tp rank's logits [B, V/tp], those of its part of the head, one of the first
    `num_tokens` tokens (None: of all): [B], the same on all ranks. (The model may have more rows
    than its tokenizer has tokens.)

    All-gather over tp: B·⌈V/tp⌉ numbers from each rank; the last ranks may have fewer, which they
    pad. Then all ranks draw, and use the tokens of rank 0 (broadcast over tp: B numbers), because a
    cumulative sum on a GPU need not be bitwise reproducible, and ranks with different tokens would
    silently compute wrong results.
    """
    group = head.tp.group
    width = -(-head.vocab_size // head.tp.size)
    parts = functional.pad(logits.T, (0, 0, 0, width - logits.shape[1]))  # [⌈V/tp⌉, B]
    whole = start_all_gather(parts, group).wait()[: head.vocab_size]  # the padding comes last
    if not whole[:num_tokens].amax(0).isfinite().all():  # of which no token can be drawn
        dtype = str(logits.dtype).removeprefix("torch.")
        why, remedy = "the model's logits are NaN or infinite", "give --dtype float32"
        raise AgreedError("--dtype", dtype, why, f"{remedy}; then check the weights")
    tokens = draw(whole[:num_tokens].T, sampling, numbers)
    dist.broadcast(tokens, group=group, group_src=0)
    return tokens
