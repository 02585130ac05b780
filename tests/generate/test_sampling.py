"""Tokens are drawn with their probabilities. Text decoded token by token never has a broken
character or a lost space."""

import math
from types import SimpleNamespace

import pytest
import sentencepiece
import torch
import torch.distributed as dist

from errors import UserError
from tests.data_samples import sentencepiece_model, tokenizer
from tools.generate import loop
from tools.generate.loop import UNFINISHED
from tools.generate.sampling import Sampling, draw, draw_over_tp


def probabilities(logits, temperature, top_k):
    """The probabilities after temperature and top_k, computed by their definition."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[: top_k or None]
    weights = {token: math.exp((logits[token] - logits[order[0]]) / temperature) for token in order}
    return [weights.get(token, 0.0) / sum(weights.values()) for token in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 5.0])
@pytest.mark.parametrize("top_k", [0, 3, 1, 99])
def test_tokens_are_as_frequent_as_they_are_probable(temperature, top_k):
    """Numbers spread evenly over [0, 1) draw each token in proportion to its probability, within
    one."""
    logits = torch.tensor([0.5, -1.0, 2.0, 1.9, -30.0, 0.0, 1.0], dtype=torch.float32)
    n = 4000
    numbers = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens = draw(logits.expand(n, -1), Sampling(temperature, top_k), numbers)
    counts = torch.bincount(tokens, minlength=len(logits)).tolist()
    for count, probability in zip(
        counts, probabilities(logits.tolist(), temperature, top_k), strict=True
    ):
        assert abs(count - n * probability) <= 1 + 1e-3 * n * probability
        assert probability > 0 or count == 0


def test_the_ends_of_the_numbers_meet_tokens_that_may_be_drawn():
    """Tokens of probability 0 are never drawn: not at the beginning of the vocabulary by the number
    0, and not at its end by the largest number below 1."""
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]] * 2)
    numbers = torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert draw(logits, Sampling(1.0), numbers).tolist() == [1, 3]
    assert draw(logits, Sampling(0.0), numbers).tolist() == [3, 3]
    assert draw(logits, Sampling(1e-320), numbers).tolist() == [3, 3]


TEXT = "naïve €5 日本語  \tdef f(self): 😀\n\n the end"


def with_dummy_prefix():
    """A SentencePiece model like Llama 2's: it adds a space before every text, and encodes unknown
    characters as bytes."""
    model = sentencepiece_model(byte_fallback=True)
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def pieces_of(monkeypatch, coder, prompt, new, stop=(2,)):
    """The pieces of text that follow a prompt, if the model generates the tokens `new`; and the
    number of tokens from which it may choose."""
    given = []
    monkeypatch.setattr(loop, "generate", lambda *arguments: given.append(arguments[-1]) or new)
    size = tokenizer().vocab_size
    about = SimpleNamespace(vocab_size=size, decode=coder.decode)
    loaded = SimpleNamespace(tokenizer=about, stop=stop, model=None)
    return list(loop.continue_text(loaded, prompt, len(new), None)), *given


@pytest.mark.parametrize("which", [tokenizer, with_dummy_prefix])
def test_text_comes_whole_however_it_is_cut(which, monkeypatch):
    """With the first tokens of a text as the prompt, however many, the rest decodes to pieces that
    join to the text and contain no broken character."""
    coder = which()
    tokens = coder.encode(TEXT)
    whole, fewer = coder.decode(tokens), 0
    for cut in range(len(tokens)):
        prompt = coder.decode(tokens[:cut])
        if prompt.endswith(UNFINISHED):
            continue  # a prompt cannot end in the middle of a character
        pieces, _ = pieces_of(monkeypatch, coder, tokens[:cut], tokens[cut:])
        assert prompt + "".join(pieces) == whole
        assert not any(UNFINISHED in piece for piece in pieces)
        assert pieces[-1] == "", "nothing was held back to the end"
        fewer += len(pieces) <= len(tokens[cut:])
    assert fewer > 0, "some characters must consist of several tokens"


def test_bytes_that_become_no_character_are_shown_at_the_end(monkeypatch):
    coder = tokenizer()
    euro = coder.encode("\u2581€")[-3:]
    new = [*euro, *euro[:2], *coder.encode("y"), coder.bos_id, *euro[:1]]
    pieces, _ = pieces_of(monkeypatch, coder, coder.encode("x"), new)
    assert pieces == ["€", UNFINISHED * 2 + "y", "", UNFINISHED]


def test_a_token_beside_the_tokenizer_may_end_a_text(monkeypatch):
    """A chat model's `<|im_end|>`, added after the ids of tokenizer.model, can be drawn."""
    size = tokenizer().vocab_size
    for stop, num_tokens in (({2}, size), ({2, size + 3}, size + 4)):
        assert pieces_of(monkeypatch, tokenizer(), [5], [], stop) == ([""], num_tokens)


def drawn(value):
    head = SimpleNamespace(tp=SimpleNamespace(group=dist.group.WORLD, size=1), vocab_size=3)
    logits = torch.tensor([[0.0, value, 1.0]], dtype=torch.float16)
    numbers = torch.tensor([0.5], dtype=torch.float64)
    try:
        return draw_over_tp(logits, head, Sampling(0.8), numbers, None).tolist()
    except UserError as error:
        return str(error)


def test_logits_that_are_no_numbers_are_refused(ranks):
    for value in (math.nan, math.inf):
        assert "--dtype = 'float16'" in ranks.run(drawn, 1, value)[0]
    assert ranks.run(drawn, 1, -math.inf) == [[2]]
