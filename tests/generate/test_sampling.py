"""Tokens are drawn with their probabilities, and every row has its own random numbers. Text decoded
token by token never has a broken character or a lost space."""

import math
from types import SimpleNamespace

import pytest
import sentencepiece
import torch
import torch.distributed as dist

from errors import UserError
from tests.data_samples import sentencepiece_model, tokenizer
from tools.generate import loop
from tools.generate.loop import UNFINISHED, Continuation
from tools.generate.sampling import Sampling, draw, draw_over_tp, row_numbers


def probabilities(logits, temperature, top_k, top_p):
    """The probabilities after temperature, top_k and top_p, computed by their definition."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[: top_k or None]
    weights = {token: math.exp((logits[token] - logits[order[0]]) / temperature) for token in order}
    kept, before = [], 0.0
    for token in order:
        if before / sum(weights.values()) >= top_p:
            break
        kept.append(token)
        before += weights[token]
    return [weights[token] / before if token in kept else 0.0 for token in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 5.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.5), (5, 0.8), (1, 1.0), (0, 1e-9), (99, 0.9)]
)
def test_tokens_are_as_frequent_as_they_are_probable(temperature, top_k, top_p):
    """Numbers spread evenly over [0, 1) draw each token in proportion to its probability, within
    one."""
    logits = torch.tensor([0.5, -1.0, 2.0, 1.9, -30.0, 0.0, 1.0], dtype=torch.float32)
    n = 4000
    numbers = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens = draw(logits.expand(n, -1), Sampling(temperature, top_k, top_p), numbers)
    counts = torch.bincount(tokens, minlength=len(logits)).tolist()
    for count, probability in zip(
        counts, probabilities(logits.tolist(), temperature, top_k, top_p), strict=True
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


def test_a_rows_numbers_are_its_own():
    whole = row_numbers(seed=1, rows=range(4), steps=10)
    assert torch.equal(whole[:, 2:], row_numbers(seed=1, rows=range(2, 4), steps=10))
    assert whole.unique().numel() == whole.numel()
    assert not torch.equal(whole, row_numbers(seed=2, rows=range(4), steps=10))


TEXT = "naïve €5 日本語  \tdef f(self): 😀\n\n the end"


def with_dummy_prefix():
    """A SentencePiece model like Llama 2's: it adds a space before every text, and encodes unknown
    characters as bytes."""
    model = sentencepiece_model(byte_fallback=True)
    return sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.mark.parametrize("which", [tokenizer, with_dummy_prefix])
def test_text_comes_whole_however_it_is_cut(which):
    """With the first tokens of a text as the prompt, however many, the rest decodes to pieces that
    join to the text and contain no broken character."""
    coder = which()
    tokens = coder.encode(TEXT)
    whole = coder.decode(tokens)
    held_back = 0
    for cut in range(len(tokens)):
        prompt = coder.decode(tokens[:cut])
        if prompt.endswith(UNFINISHED):
            continue  # a prompt cannot end in the middle of a character
        following = Continuation(coder, tokens[:cut])
        pieces = [following.add(token) for token in tokens[cut:]]
        assert following.end() == ""
        assert prompt + "".join(pieces) == whole
        assert not any(UNFINISHED in piece for piece in pieces)
        held_back += pieces.count("")
    assert held_back > 0, "some characters must consist of several tokens"


def test_bytes_that_become_no_character_are_shown_at_the_end():
    coder = tokenizer()
    euro = coder.encode("\u2581€")[-3:]
    following = Continuation(coder, coder.encode("x"))
    assert [following.add(token) for token in euro] == ["", "", "€"]
    after = [following.add(token) for token in [*euro[:2], *coder.encode("y")]]
    assert after == ["", "", UNFINISHED * 2 + "y"]
    assert following.add(coder.bos_id) == ""
    assert [following.add(token) for token in euro[:1]] == [""]
    assert following.end() == UNFINISHED


def test_a_token_beside_the_tokenizer_may_end_a_text(monkeypatch):
    """A chat model's `<|im_end|>`, added after the ids of tokenizer.model, can be drawn."""
    asked = []
    monkeypatch.setattr(loop, "generate", lambda *given: asked.append(given[-1]) or [])
    size = tokenizer().vocab_size
    for stop in ({2}, {2, size + 3}):
        loaded = SimpleNamespace(tokenizer=tokenizer(), stop=stop, model=None)
        assert "".join(text for _, text in loop.continue_texts(loaded, [[1]], 4, None)) == ""
    assert asked == [size, size + 4]


def test_a_silent_token_does_not_begin_a_text():
    """A word keeps its space after a bos in the middle of the text."""
    coder = with_dummy_prefix()
    following = Continuation(coder, coder.encode("the"))
    assert following.add(coder.bos_id()) == ""
    assert "".join(map(following.add, coder.encode("end"))) == " end"


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
