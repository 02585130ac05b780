"""The generation loop: each step computes the next token of every row with the key/value cache."""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from model.transformer import Transformer
from tools.generate.cache import KeyValueCache
from tools.generate.continuation import Continuation
from tools.generate.load_model import Loaded
from tools.generate.sampling import Sampling, draw_over_tp, row_numbers


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: list[list[int]],
    count: int,
    sampling: Sampling,
    stop: Collection[int] = (),
    first_row: int = 0,
    num_tokens: int | None = None,
) -> Iterator[list[int | None]]:
    """Yields the next token of each row, up to `count` times; None for a row that has reached a
    token of `stop`. Ends when all rows have.

    All tp ranks must call it with the same arguments and iterate equally far.

    Args:
        prompts: the tokens of each row, at least one; lengths may differ.
        stop: tokens that end a text and are not part of it.
        first_row: number of the first row; a row's number and `sampling.seed` determine its random
            numbers.
        num_tokens: of the tokenizer, of which each drawn token is one; None: all that the model has
            rows for.
    """
    embedding, head = model.embedding, model.head
    assert embedding is not None, "the whole model in one stage"
    assert head is not None
    device, dtype = embedding.weight.device, embedding.weight.dtype
    lengths = [len(prompt) for prompt in prompts]
    cache = KeyValueCache(lengths, count, dtype, device)
    rows = range(first_row, first_row + len(prompts))
    numbers = row_numbers(sampling.seed, rows, count).to(device)

    # padded with an arbitrary token, because padding is masked
    padded = [[0] * (max(lengths) - len(prompt)) + prompt for prompt in prompts]
    tokens = torch.tensor(padded, device=device).T  # [S, B], then [1, B]
    running = [True] * len(prompts)
    for step in range(count):
        logits = next_logits(model, tokens, cache)[0]  # [B, V/tp]
        last = head.vocab_size if num_tokens is None else num_tokens
        drawn = draw_over_tp(  # [B]
            logits, head.vocab_size, sampling, numbers[step], head.tp.group, last
        )
        new = drawn.tolist()
        running = [runs and token not in stop for runs, token in zip(running, new, strict=True)]
        if not any(running):
            return
        yield [token if runs else None for runs, token in zip(running, new, strict=True)]
        tokens = drawn.unsqueeze(0)


def next_logits(model: Transformer, tokens: Tensor, cache: KeyValueCache) -> Tensor:
    """Runs tokens [S, B], which follow those in the cache, and adds them to it; returns the logits
    [1, B, V/tp] after the last of them.

    The model must be in one stage, without sequence parallelism, as one token cannot be sharded.
    """
    assert model.embedding is not None, "the whole model in one stage"
    assert model.norm is not None
    assert model.head is not None
    hidden = model.embedding(tokens)
    cache.next(tokens.shape[0])
    for name, block in model.blocks.items():
        hidden = block(hidden, *block.attention.inputs(cache.of_layer(name)))
    return model.head(model.norm(hidden[-1:]))


def continue_texts(
    loaded: Loaded, prompts: list[list[int]], count: int, sampling: Sampling, first_row: int = 0
) -> Iterator[tuple[int, str]]:
    """Yields (row, text): pieces of text as they become certain, and the row of the prompt."""
    texts = [Continuation(loaded.tokenizer, prompt) for prompt in prompts]
    num_tokens = loaded.tokenizer.vocab_size
    for new in generate(loaded.model, prompts, count, sampling, loaded.stop, first_row, num_tokens):
        for row, token in enumerate(new):
            if token is not None:
                yield row, texts[row].add(token)
    for row, text in enumerate(texts):
        yield row, text.end()
