"""The generation loop: each step computes the next token with the key/value cache, and tokens
become text as soon as it is certain, without incomplete characters."""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from model.transformer import Transformer
from tools.generate.cache import KeyValueCache
from tools.generate.load_model import Loaded
from tools.generate.sampling import Sampling, draw_over_tp

UNFINISHED = "\ufffd"  # the result of decoding bytes that are invalid or incomplete UTF-8


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
