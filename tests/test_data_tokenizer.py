"""Encoding and decoding with the tokenizer reproduces every text exactly."""

import random
import re

import pytest
import sentencepiece

from data.sources import STDLIB
from data.tokenizer import Tokenizer
from errors import UserError
from tests.data_samples import HOSTILE, MANY, sentencepiece_model, texts_of, tokenizer, write


def test_every_stdlib_file_round_trips() -> None:
    texts = texts_of(STDLIB)
    assert sum(map(len, texts)) > 5_000_000
    for text, ids in zip(texts, tokenizer().encode_batch(texts), strict=True):
        assert tokenizer().decode(ids) == text


def test_random_unicode_round_trips() -> None:
    generator = random.Random(0)
    for _ in range(300):
        points = (
            generator.choice([generator.randrange(0x80), generator.randrange(0x110000)])
            for _ in range(40)
        )
        text = "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
        assert tokenizer().decode(tokenizer().encode(text)) == text


def test_control_plain_sentencepiece_does_not_round_trip() -> None:
    """Control: the hostile strings find a tokenizer that alters text, here SentencePiece with its
    default settings."""
    plain = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    lost = {name for name, text in HOSTILE.items() if plain.decode(plain.encode(text)) != text}
    assert lost >= {"tabs", "spaces around", "trailing newlines", "SentencePiece's space",
                    "compatibility forms"}  # fmt: skip


def test_control_space_mark_needs_our_spelling() -> None:
    raw = sentencepiece.SentencePieceProcessor(model_proto=tokenizer().model)
    assert raw.decode(raw.encode("a\u2581b")) == "a b"


def test_lone_surrogates_become_replacement_characters() -> None:
    assert tokenizer().decode(tokenizer().encode("a\ud800b\udfff 🐍")) == "a\ufffdb\ufffd 🐍"


def test_bos_and_eos_are_silent_and_broken_bytes_do_not_raise() -> None:
    ids = tokenizer().encode("def f():\n    pass\n")
    assert (
        tokenizer().decode([tokenizer().bos_id, *ids, tokenizer().eos_id]) == "def f():\n    pass\n"
    )
    snake = tokenizer().encode("🐍")
    assert len(snake) == 4  # four bytes, because it is not in the vocabulary
    assert "\ufffd" in tokenizer().decode(snake[:2])


def test_newlines_and_digits_are_tokens_of_their_own() -> None:
    assert tokenizer().encode("a\n\nb")[1:3] == tokenizer().encode("\n") * 2
    assert len(tokenizer().encode("20261121")) == 8


def test_training_is_deterministic_and_reaches_the_size() -> None:
    texts = texts_of(MANY)
    one, two = Tokenizer.train(texts, 500), Tokenizer.train(texts, 500)
    assert one.sha256 == two.sha256
    assert one.vocab_size == 500
    assert one.sha256 != Tokenizer.train(texts[:-5], 500).sha256


@pytest.mark.parametrize(
    ("texts", "size", "key"),
    [
        (["hello world"], 4000, "--vocab-size"),
        (["hello world"], 100, "--vocab-size"),
        ([], 300, "--source"),
    ],
    ids=["too large", "too small", "no text"],
)
def test_training_refuses(texts: list[str], size: int, key: str) -> None:
    with pytest.raises(UserError) as raised:
        Tokenizer.train(texts, size)
    assert raised.value.key == key
    # The message does not name options of SentencePiece, which our command does not have.
    assert "character_coverage" not in str(raised.value)
    if found := re.search(r"at (?:least|most) (\d+)", raised.value.remedy):  # the remedy works
        assert Tokenizer.train(texts, int(found[1])).vocab_size == int(found[1])


def test_what_the_source_refuses_is_said_as_it_is() -> None:
    """An error of the source arrives unchanged, although SentencePiece wraps what its iterator
    raises."""

    def texts():
        yield "some text"
        raise UserError("--source", "x.jsonl", "line 31: it is not JSON", "mend it")

    with pytest.raises(UserError, match="line 31: it is not JSON") as refused:
        Tokenizer.train(texts(), 600)
    assert refused.value.key == "--source"


def test_loading_refuses_what_is_no_model(tmp_path) -> None:
    write(tmp_path, {"empty.model": b""})
    for name in ("empty.model", "missing.model"):
        with pytest.raises(UserError, match=name):
            Tokenizer.load(tmp_path / name)
