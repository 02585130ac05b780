"""Tokens are drawn with their probabilities. Text decoded token by token never has a broken
character or a lost space."""

import math
from types import SimpleNamespace

import pytest
import sentencepiece
import torch
import torch.distributed as dist

from tests.data_samples import sentencepiece_model, tokenizer
from tests.runs import said_by
from tools.generate import loop
from tools.generate.loop import UNFINISHED, Sampling, draw, draw_over_tp, probabilities


@pytest.mark.parametrize("temperature", [0.3, 5.0])
@pytest.mark.parametrize("top_k", [0, 3, 1, 99])
def test_tokens_are_drawn_with_their_probabilities(temperature, top_k):
    """Those of the definition; the counts of many draws are within four deviations."""
    logits = torch.tensor([0.5, -1.0, 2.0, 1.9, -30.0, 0.0, 1.0])
    values, sampling, n = logits.tolist(), Sampling(temperature, top_k), 4000
    least = sorted(values)[-min(top_k or 99, len(values))]
    weights = [math.exp(value / temperature) if value >= least else 0.0 for value in values]
    expected = [weight / sum(weights) for weight in weights]
    assert probabilities(logits[None], sampling)[0].tolist() == pytest.approx(expected, rel=1e-12)
    tokens = draw(logits.expand(n, -1), sampling, torch.Generator().manual_seed(0))
    for count, p in zip(tokens.bincount(minlength=len(values)).tolist(), expected, strict=True):
        assert abs(count - n * p) <= 4 * math.sqrt(n * p * (1 - p))


def test_a_temperature_near_zero_draws_the_most_likely():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]] * 2)
    for temperature in (0.0, 1e-320):
        assert draw(logits, Sampling(temperature), torch.Generator()).tolist() == [3, 3]


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
    return draw_over_tp(logits, head, Sampling(0.8, top_k=1), torch.Generator(), None).tolist()


def test_logits_that_are_no_numbers_are_refused(ranks):
    for value in (math.nan, math.inf):
        (message,) = ranks.run(said_by, 1, drawn, value)
        assert message.startswith("AgreedError: --dtype = 'float16'")
    assert ranks.run(drawn, 1, -math.inf) == [[2]]
