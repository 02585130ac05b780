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


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """[B, V] → [B, V] float64, by temperature and top_k, in which equal logits are together."""
    logits = logits.double()
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # minus the largest: a temperature near 0 would make it infinite
    return ((logits - logits.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Draws one token per row: logits [B, V] → tokens [B] int64."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial(probabilities(logits, sampling), 1, generator=generator).squeeze(1)


def draw_over_tp(
    logits: Tensor,
    head: Head,
    sampling: Sampling,
    generator: torch.Generator,
    num_tokens: int | None,
) -> Tensor:
    """Draws from each tp rank's logits [B, V/tp], those of its part of the head, one of the first
    `num_tokens` tokens (None: of all): [B], the same on all ranks. (The model may have more rows
    than its tokenizer has tokens.)

    All-gather over tp: B·⌈V/tp⌉ numbers from each rank; the last ranks may have fewer, which they
    pad. Then all ranks draw, and use the tokens of rank 0 (broadcast over tp: B numbers), because
    sums on a GPU need not be bitwise reproducible, and ranks with different tokens would silently
    compute wrong results.
    """
    group = head.tp.group
    width = -(-head.vocab_size // head.tp.size)
    parts = functional.pad(logits.T, (0, 0, 0, width - logits.shape[1]))  # [⌈V/tp⌉, B]
    whole = start_all_gather(parts, group).wait()[: head.vocab_size]  # the padding comes last
    if not whole[:num_tokens].amax(0).isfinite().all():  # of which no token can be drawn
        dtype = str(logits.dtype).removeprefix("torch.")
        why, remedy = "the model's logits are NaN or infinite", "give --dtype float32"
        raise AgreedError("--dtype", dtype, why, f"{remedy}; then check the weights")
    tokens = draw(whole[:num_tokens].T, sampling, generator)
    dist.broadcast(tokens, group=group, group_src=0)
    return tokens
