"""Text decoded token by token never has a broken character or a lost space."""

import io

import pytest
import sentencepiece

from tests.data_samples import tokenizer
from tools.generate.loop import UNFINISHED, Continuation

TEXT = "naïve €5 日本語  \tdef f(self): 😀\n\n the end"


def with_dummy_prefix():
    """A SentencePiece model like Llama 2's: it adds a space before every text, and encodes unknown
    characters as bytes."""
    out = io.BytesIO()
    lines = ["the end of the text is here and there", "self reads the other end of it"] * 20
    options = {"model_type": "bpe", "vocab_size": 300, "byte_fallback": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, **options
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


@pytest.mark.parametrize("which", [tokenizer, with_dummy_prefix])
@pytest.mark.parametrize("text", [TEXT, "the end of it there"])
def test_text_comes_whole_however_it_is_cut(which, text):
    """With the first tokens of a text as the prompt, however many, the rest decodes to pieces that
    join to the text and contain no broken character."""
    coder = which()
    tokens = coder.encode(text)
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
    assert held_back > 0 or text != TEXT, "some characters must consist of several tokens"


def test_bytes_that_become_no_character_are_shown_at_the_end():
    coder = tokenizer()
    euro = coder.encode("\u2581€")[-3:]
    following = Continuation(coder, coder.encode("x"))
    assert [following.add(token) for token in euro] == ["", "", "€"]
    assert [following.add(token) for token in [*euro[:2], *coder.encode("y")]] == [
        "",
        "",
        UNFINISHED * 2 + "y",
    ]
    assert following.add(coder.bos_id) == ""
    assert [following.add(token) for token in euro[:1]] == [""]
    assert following.end() == UNFINISHED


def test_a_silent_token_does_not_begin_a_text():
    """A word keeps its space after a bos in the middle of the text."""
    coder = with_dummy_prefix()
    the, end = coder.encode("the"), coder.encode("end")
    following = Continuation(coder, the)
    assert following.add(coder.bos_id()) == ""
    assert "".join(following.add(token) for token in end) == " end"
