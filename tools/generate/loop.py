"""The generation loop: each step computes the next token of every row with the key/value cache,
and tokens become text as soon as it is certain, without incomplete characters."""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from model.transformer import Transformer
from tools.generate.cache import KeyValueCache
from tools.generate.load_model import Loaded
from tools.generate.sampling import Sampling, draw_over_tp, row_numbers

UNFINISHED = "\ufffd"  # the result of decoding bytes that are invalid or incomplete UTF-8


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
    head = model.head
    assert head is not None, "the whole model in one stage"
    device, lengths = head.weight.device, [len(prompt) for prompt in prompts]
    cache = KeyValueCache(lengths, count, head.weight.dtype, device)
    rows = range(first_row, first_row + len(prompts))
    numbers = row_numbers(sampling.seed, rows, count).to(device)

    # padded with an arbitrary token, because padding is masked
    padded = [[0] * (max(lengths) - len(prompt)) + prompt for prompt in prompts]
    tokens = torch.tensor(padded, device=device).T  # [S, B], then [1, B]
    running = [True] * len(prompts)
    for step in range(count):
        logits = next_logits(model, tokens, cache)[0]  # [B, V/tp]
        drawn = draw_over_tp(logits, head, sampling, numbers[step], num_tokens)  # [B]
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
        hidden = block(hidden, *block.attention.inputs(cache.layers[name]))
    return model.head(model.norm(hidden[-1:]))


class Continuation:
    """The text that follows a prompt, token by token.

    A character may take several tokens, and is held back until its last byte has arrived. A token's
    text may also depend on the tokens before it: SentencePiece models that put a space before every
    text remove a leading space when they decode, so a word from the middle, decoded by itself,
    would lose its space. So a token's text is what it adds to the text of the tokens before it.
    Decoding all of them would cost more with every token; those whose text was output last suffice.

        add("▁the") → " the"     add(E2) → ""     add(82) → ""     add(AC) → "€"     end() → ""
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._decode = tokenizer.decode
        self._given, self._waiting = list(prompt), list[int]()

    def add(self, token: int) -> str:
        """Adds a token, and returns the text that has thereby become certain; it may be empty."""
        self._waiting.append(token)
        return self._next(hold_back=True)

    def end(self) -> str:
        """Returns the text held back, with U+FFFD for bytes that did not become a character."""
        return self._next(hold_back=False)

    def _next(self, hold_back: bool) -> str:
        text = self._decode(self._given + self._waiting)
        if hold_back and text.endswith(UNFINISHED):
            return ""
        new = text[len(self._decode(self._given)) :]
        if new:  # bos and eos have no text, so the context before them is kept
            self._given, self._waiting = self._waiting, []
        return new


def continue_texts(
    loaded: Loaded, prompts: list[list[int]], count: int, sampling: Sampling, first_row: int = 0
) -> Iterator[tuple[int, str]]:
    """Yields (row, text): pieces of text as they become certain, and the row of the prompt."""
    texts = [Continuation(loaded.tokenizer, prompt) for prompt in prompts]
    # a token that was added beside tokenizer.model may end a text too
    num_tokens = max(loaded.tokenizer.vocab_size, *(token + 1 for token in loaded.stop))
    for new in generate(loaded.model, prompts, count, sampling, loaded.stop, first_row, num_tokens):
        for row, token in enumerate(new):
            if token is not None:
                yield row, texts[row].add(token)
    for row, text in enumerate(texts):
        yield row, text.end()
