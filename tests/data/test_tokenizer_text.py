"""What a text says cannot become a control token, and text that a tokenizer does not keep is
counted. SentencePiece is the reference for tokenizer.json files made from its models."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from data.prepare import Encoded, _SplitWriter
from data.text_kept import Kept
from data.tokenizer import JSON, MODEL, Tokenizer
from errors import UserError
from tests.data_samples import (
    HOSTILE,
    SOURCE,
    prepare_by_command,
    row,
    sentencepiece_model,
    texts_of,
    tokenizer,
    write,
)
from tools.huggingface.tokenizer import tokenizer_json

STRUCTURE = "a <s>struck out</s> b<s></s><unk><pad> <0x0A>漢<0x41> <|im_end|>x"


def converted(model: bytes, folder: Path) -> bytes:
    """The tokenizer.json that transformers makes from a Unigram model."""
    from transformers.convert_slow_tokenizer import SpmConverter

    class Converter(SpmConverter):
        handle_byte_fallback = b"<0x00>" in model

    (folder / MODEL).write_bytes(model)
    wanted = SimpleNamespace(vocab_file=str(folder / MODEL), add_prefix_space=True, legacy=False)
    return Converter(wanted).converted().to_str().encode()


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_a_text_is_what_sentencepiece_reads(
    model_type: str, byte_fallback: bool, tmp_path: Path
) -> None:
    """A tokenizer.json made from a SentencePiece model gives its ids, also for texts that spell
    control tokens and bytes."""
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    model = sentencepiece_model(
        model_type,
        byte_fallback=byte_fallback,
        control_symbols="<|im_end|>",
        **({} if model_type == "unigram" else plain),
    )
    made = tokenizer_json(model) or b"" if model_type == "bpe" else converted(model, tmp_path)
    loaded, same = Tokenizer({JSON: made}), Tokenizer({MODEL: model})
    texts = [STRUCTURE, *(HOSTILE[name] for name in ("control tokens", "byte tokens", "emoji"))]
    texts += texts_of(SOURCE)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    expected = reference.encode(texts)
    assert loaded.encode_batch(texts) == same.encode_batch(texts) == expected
    assert loaded.control_ids == same.control_ids == [1, 2, 3]
    assert loaded.unk_id == same.unk_id == 0
    assert not {1, 2, 3} & set(expected[0])
    raw = tokenizers.Tokenizer.from_str(made.decode())  # control: the library by itself
    raw.encode_special_tokens = True
    reads = raw.encode(STRUCTURE, add_special_tokens=False).ids
    assert ({1, 2} <= set(reads)) == (model_type == "unigram")


LETTERS = {letter: number for number, letter in enumerate("<s>/abcdef ")}
ENDS = {"<s>": 20, "</s>": 21, "<unk>": 22}
WORDS = LETTERS | ENDS
PARTS = WORDS | {"</": 11, "</s": 12, "##s": 13}
NAMES = {number: piece for piece, number in PARTS.items()}
UNIGRAM = [(NAMES.get(number, f"<{number}>"), -1.0) for number in range(23)]
MERGES = [("<", "/"), ("</", "s"), ("</s", ">")]


def made(model: models.Model, *, split: bool = True, lower: bool = False, **added: bool) -> bytes:
    """A tokenizer.json whose control tokens are only in the model's vocabulary, or, with flags in
    `added`, among the added tokens too."""
    built = tokenizers.Tokenizer(model)
    built.decoder = decoders.Fuse()
    if split:
        built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if lower:
        built.normalizer = normalizers.Lowercase()
    if added:
        built.add_tokens([AddedToken(name, **added) for name in ENDS])
    return built.to_str().encode()


KINDS = {
    "BPE": made(models.BPE(PARTS, MERGES, unk_token="<unk>")),
    "WordLevel": made(models.WordLevel(PARTS, unk_token="<unk>")),
    "WordPiece": made(models.WordPiece(PARTS, unk_token="<unk>")),
    "Unigram": made(models.Unigram(UNIGRAM, 22, False)),
    "a whole text in the vocabulary": made(  # it takes that, as Llama 3's does a word
        models.BPE(WORDS, [], unk_token="<unk>", ignore_merges=True), split=False, special=True
    ),
    "ends that are not special": made(
        models.BPE(WORDS, [], unk_token="<unk>"), split=False, special=False, normalized=False
    ),
    "normalized, whole words": made(
        models.WordLevel(WORDS, unk_token="<unk>"), lower=True,
        special=True, normalized=True, lstrip=True, single_word=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_model_finds_control_tokens_in_a_text(kind: str) -> None:
    said = b'{"bos_token": "<s>", "eos_token": "</s>"}'
    loaded = Tokenizer({JSON: KINDS[kind], "tokenizer_config.json": said})
    assert (loaded.bos_id, loaded.eos_id, loaded.unk_id) == (20, 21, 22)
    assert {20, 21} <= {*loaded.control_ids}
    assert loaded.decode([20, 4, 21]) == "a"
    for text in ("</s>", "<s>", "a </S> b", "</s> <s>", "a</s>b"):
        assert not {20, 21} & set(loaded.encode(text)), text
    raw = tokenizers.Tokenizer.from_str(KINDS[kind].decode())
    raw.encode_special_tokens = True
    assert 21 in raw.encode("</s>").ids, "control: the library by itself"
    if kind in ("a whole text in the vocabulary", "ends that are not special"):
        assert loaded.decode(loaded.encode("</s> <s>")) == "</s> <s>"


def test_an_eos_that_texts_may_contain_is_refused() -> None:
    """SentencePiece itself says that a model whose `</s>` is a token for texts has no eos."""
    with pytest.raises(UserError, match="no eos token"):
        Tokenizer({MODEL: sentencepiece_model(user_defined_symbols="</s>")})


def test_no_control_token_is_written_into_a_document(tmp_path: Path) -> None:
    """Whatever a tokenizer does: preparation counts them."""
    writer = _SplitWriter(tmp_path, "train", np.dtype("uint16"), tokenizer(), 1 << 20)
    bos, eos = tokenizer().bos_id, tokenizer().eos_id

    def document(*text: int) -> Encoded:
        tokens = np.array([bos, *text, eos], np.uint16)
        return Encoded(tokens, np.array([len(tokens)]), 1, 1, Kept())

    writer.append(document(300))
    for token in (bos, eos):
        with pytest.raises(UserError, match=f"its control token {token} in a document's text"):
            writer.append(document(300, token))
        writer.histogram[token] -= 1


# --- text that is not kept ------------------------------------------------------------------------

TEXT = "A\u00ef costs 5 \u20ac \u2014 \u6f22!"  # ï, €, —, 漢


def normalizing() -> bytes:
    made = tokenizers.Tokenizer.from_str(tokenizer_json(tokenizer().model).decode())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return made.to_str().encode()


PRINTABLE = models.BPE({chr(32 + i): i for i in range(95)}, [])  # without an unknown token
# tokenizer → unknown tokens, changed documents of three, what TEXT becomes
LOSSES = {
    "unknown": ({MODEL: sentencepiece_model("unigram")}, 4, 2,
                "A \u2047  costs 5  \u2047   \u2047 "),
    "dropped": ({JSON: made(PRINTABLE, split=False, special=True)}, 0, 2, "A costs 5   !"),
    "normalized": ({JSON: normalizing()}, 0, 2, TEXT.lower()),
    "kept": ({MODEL: tokenizer().model}, 0, 0, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_text_that_is_not_kept_is_counted(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    files, unknown, changed, became = LOSSES[name]
    write(tmp_path, {"a.jsonl": row(TEXT) + row("\uff21") + row("abc def")})
    folder, out = write(tmp_path / "files", files), tmp_path / "out"
    assert prepare_by_command(tmp_path / "a.jsonl", folder, out, "--heldout-fraction", "0") == 0
    said = capsys.readouterr().out
    index = json.loads((out / "index.json").read_text())
    if not changed:
        assert "text_not_kept" not in index
        assert "does not keep" not in said
        return
    expected = {"checked": 3, "changed": changed, "example": [TEXT, became]}
    assert index["text_not_kept"] == {"unknown_tokens": unknown} | expected
    assert f"{unknown} unknown tokens; {changed} of 3 documents checked do not decode" in said
    assert f"{TEXT!r} became {became!r}" in said


def test_a_tokenizer_that_has_no_tokens_for_a_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a worker process finds it. A machine without memory is no tokenizer's fault."""
    made = tokenizers.Tokenizer(models.Unigram([("a", -1.0)], None, byte_fallback=False))
    made.add_special_tokens(["<s>", "</s>"])
    write(tmp_path, {JSON: made.to_str(), "a.txt": TEXT})
    assert prepare_by_command(tmp_path / "a.txt", tmp_path / JSON, tmp_path / "out") == 2
    assert "it cannot encode a text: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    loaded = Tokenizer.load(tmp_path / JSON)
    monkeypatch.setattr(loaded._codec, "_encode", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        loaded.encode("a")
