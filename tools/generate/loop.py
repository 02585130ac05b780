"""The generation loop: each step computes the next token with the key/value cache, and tokens
become text as soon as it is certain, without incomplete characters. A token is drawn from the
logits:

    logits ─ the top_k most likely ─ softmax(logits / temperature) ─ draw
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from model.attention import BaseAttention
from model.transformer import Head, Transformer
from parallel.collectives import start_all_gather
from runtime.agreement import AgreedError
from tools.command import at_least
from tools.generate.cache import KeyValueCache
from tools.generate.load_model import Loaded

UNFINISHED = "\ufffd"  # the result of decoding bytes that are invalid or incomplete UTF-8


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


@torch.inference_mode()
def generate(
    model: Transformer,
    prompt: list[int],
    count: int,
    sampling: Sampling,
    stop: Collection[int] = (),
    num_tokens: int | None = None,
) -> Iterator[int]:
    """Yields up to `count` tokens that follow those of the prompt, up to a token of `stop`, which
    ends a text and is no part of it.

    All tp ranks must call it with the same arguments and iterate equally far.

    num_tokens: of the tokenizer, of which each drawn token is one; None: all that the model has
    rows for.
    """
    head = model.head
    assert head is not None, "the whole model in one stage"
    check_cached(model)
    device = head.weight.device
    cache = KeyValueCache(len(prompt) + count, head.weight.dtype, device)
    tokens = torch.tensor(prompt, device=device).unsqueeze(1)  # [S, 1], then [1, 1]
    generator = torch.Generator(device).manual_seed(sampling.seed)
    for _ in range(count):
        logits = next_logits(model, tokens, cache)[0]  # [1, V/tp]
        drawn = draw_over_tp(logits, head, sampling, generator, num_tokens)  # [1]
        if (token := int(drawn)) in stop:
            return
        yield token
        tokens = drawn.unsqueeze(0)


def check_cached(model: Transformer) -> None:
    """Raises AgreedError if the cache lacks what a kind of attention keeps of earlier tokens."""
    for name, block in model.blocks.items():
        if not isinstance(block.attention, BaseAttention):
            kind = model.config.attention_of(int(name))
            why = "is no BaseAttention, of which alone the cache has earlier tokens"
            remedy = "derive it from BaseAttention (model/attention/__init__.py)"
            raise AgreedError("model.attention", kind, why, remedy)


def next_logits(model: Transformer, tokens: Tensor, cache: KeyValueCache) -> Tensor:
    """Runs tokens [S, 1], which follow those in the cache, and adds them to it; returns the logits
    [1, 1, V/tp] after the last of them.

    The model must be in one stage, without sequence parallelism, as one token cannot be sharded.
    """
    assert model.embedding is not None, "the whole model in one stage"
    assert model.norm is not None
    assert model.head is not None
    hidden = model.embedding(tokens)
    cache.next(tokens.shape[0])
    for name, block in model.blocks.items():
        hidden = block(hidden, *block.attention.inputs(cache.layers[name]))
    return model.head(model.norm(hidden[-1:]))


def continue_text(
    loaded: Loaded, prompt: list[int], count: int, sampling: Sampling
) -> Iterator[str]:
    """Yields the text that follows the prompt, in pieces, as they become certain.

    A character may take several tokens, and is held back until its last byte has arrived; at the
    end, U+FFFD is in the place of bytes that did not become a character. All tokens are decoded
    each time, because a token's text may depend on those before it: SentencePiece models that put
    a space before every text remove a leading space when they decode, so a word from the middle,
    decoded by itself, would lose its space.
    """
    decode, tokens = loaded.tokenizer.decode, list(prompt)
    # a token that was added beside tokenizer.model may end a text too
    num_tokens = max(loaded.tokenizer.vocab_size, *(token + 1 for token in loaded.stop))
    given = text = decode(tokens)
    for token in generate(loaded.model, prompt, count, sampling, loaded.stop, num_tokens):
        tokens.append(token)
        text = decode(tokens)
        if not text.endswith(UNFINISHED):
            yield text[len(given) :]
            given = text
    yield text[len(given) :]


# --- the next token ---


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """[B, V] → [B, V] float64, by temperature and top_k. Ties with the top_k-th logit are kept."""
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
