"""What a text says cannot become a control token, and text that a tokenizer does not keep is
counted. SentencePiece is the reference for tokenizer.json files made from its models."""

import io
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from data.prepare import Encoded, _SplitWriter
from data.sources import documents
from data.text_kept import Kept
from data.tokenizer import JSON, MODEL, Tokenizer
from errors import UserError
from tests.data_samples import HOSTILE, SOURCE, tokenizer
from tools import prepare as prepare_command
from tools.huggingface.tokenizer import tokenizer_json

STRUCTURE = "a <s>struck out</s> b<s></s><unk><pad> <0x0A>漢<0x41> <|im_end|>x"


@cache
def trained(model_type: str, **options: object) -> bytes:
    """A SentencePiece model with a control token of its own."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for d in documents(SOURCE) for line in d.text.split("\n") if line),
        model_writer=out,
        model_type=model_type,
        vocab_size=500,
        minloglevel=2,
        control_symbols=["<|im_end|>"],
        **options,
    )
    return out.getvalue()


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
    if model_type == "unigram":
        model = trained(model_type, byte_fallback=byte_fallback)
        made = converted(model, tmp_path)
    else:
        plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
        model = trained(model_type, byte_fallback=byte_fallback, **plain)
        made = tokenizer_json(model) or b""
    loaded, same = Tokenizer({JSON: made}), Tokenizer({MODEL: model})
    texts = [STRUCTURE, *(HOSTILE[name] for name in ("control tokens", "byte tokens", "emoji"))]
    texts += [document.text for document in documents(SOURCE)]
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


def word_model(pieces: dict[str, int], **options: object) -> tokenizers.Tokenizer:
    """A BPE model that takes a whole text that is in its vocabulary, as Llama 3's does a word."""
    made = tokenizers.Tokenizer(models.BPE(pieces, [], unk_token="<unk>", **options))
    made.decoder = decoders.Fuse()
    return made


LETTERS = {letter: number for number, letter in enumerate("<s>/abcdef ")}
ENDS = {"<s>": 20, "</s>": 21, "<unk>": 22}


def special(made: tokenizers.Tokenizer, **flags: bool) -> bytes:
    made.add_special_tokens([AddedToken(name, **flags) for name in ENDS])
    return made.to_str().encode()


def not_special() -> bytes:
    content = json.loads(special(word_model(LETTERS | ENDS)))
    for token in content["added_tokens"]:
        token["special"] = False
    return json.dumps(content).encode()


def lowered() -> bytes:
    made = tokenizers.Tokenizer(models.WordLevel(LETTERS | ENDS, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return special(made, normalized=True, lstrip=True, single_word=True)


def in_vocabulary(model: models.Model) -> bytes:
    """The control tokens are only in the model's vocabulary, not among the added ones."""
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer, made.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    return made.to_str().encode()


WORDS = LETTERS | ENDS | {"</": 11, "</s": 12, "##s": 13}
PIECES = {i: piece for piece, i in WORDS.items()}
MERGES = [("<", "/"), ("</", "s"), ("</s", ">")]
KINDS = {
    "BPE": in_vocabulary(models.BPE(WORDS, MERGES, unk_token="<unk>")),
    "WordLevel": in_vocabulary(models.WordLevel(WORDS, unk_token="<unk>")),
    "WordPiece": in_vocabulary(models.WordPiece(WORDS, unk_token="<unk>")),
    "Unigram": in_vocabulary(
        models.Unigram([(PIECES.get(i, f"<{i}>"), -1.0) for i in range(23)], 22, False)
    ),
    "a whole text in the vocabulary": special(word_model(LETTERS | ENDS, ignore_merges=True)),
    "ends that are not special": not_special(),
    "normalized, whole words": lowered(),
}


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
        Tokenizer({MODEL: trained("bpe", user_defined_symbols="</s>")})


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


def dropping() -> bytes:
    """Characters outside the alphabet have no token, not even an unknown one."""
    made = tokenizers.Tokenizer(models.BPE({chr(32 + i): i for i in range(95)}, []))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<s>", "</s>"])
    return made.to_str().encode()


def normalizing() -> bytes:
    made = tokenizers.Tokenizer.from_str(tokenizer_json(tokenizer().model).decode())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return made.to_str().encode()


# tokenizer → unknown tokens, changed documents of three, what TEXT becomes
LOSSES = {
    "unknown": ({MODEL: trained("unigram")}, 4, 2, "A \u2047  costs 5  \u2047   \u2047 "),
    "dropped": ({JSON: dropping()}, 0, 2, "A costs 5   !"),
    "normalized": ({JSON: normalizing()}, 0, 2, TEXT.lower()),
    "kept": ({MODEL: tokenizer().model}, 0, 0, ""),
}


@pytest.mark.parametrize("name", LOSSES)
def test_text_that_is_not_kept_is_counted(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    files, unknown, changed, became = LOSSES[name]
    rows = [{"text": TEXT}, {"text": "\uff21"}, {"text": "abc def"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "files").mkdir()
    for file, content in files.items():
        (tmp_path / "files" / file).write_bytes(content)
    command = ["--source", str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "files")]
    command += ["--out", str(tmp_path / "out"), "--workers", "1", "--heldout-fraction", "0"]
    assert prepare_command.main(command) == 0
    said = capsys.readouterr().out
    index = json.loads((tmp_path / "out" / "index.json").read_text())
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
    (tmp_path / JSON).write_text(made.to_str())
    (tmp_path / "a.txt").write_text(TEXT)
    command = ["--source", str(tmp_path / "a.txt"), "--tokenizer", str(tmp_path / JSON)]
    assert prepare_command.main([*command, "--out", str(tmp_path / "out"), "--workers", "1"]) == 2
    assert "it cannot encode a text: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    loaded = Tokenizer.load(tmp_path / JSON)
    monkeypatch.setattr(loaded._codec, "_encode", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        loaded.encode("a")
