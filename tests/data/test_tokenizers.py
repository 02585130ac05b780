"""One interface for two tokenizer libraries (`tokenizer.json` and SentencePiece), chosen by the
file, reproduces every text exactly. Prepared data and checkpoints keep all its files. What a text
says cannot become a control token, and text that a tokenizer does not keep is counted."""

import base64
import hashlib
import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.numpy
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from data.config import DataConfig
from data.dataset import open_data
from data.prepare import Encoded, _SplitWriter, prepare
from data.tokenizer import JSON, MODEL, Tokenizer
from errors import UserError
from runtime.checkpoint.manifest import read_manifest
from tests import ROOT
from tests.data_samples import (
    HOSTILE,
    MANY,
    SOURCE,
    prepare_by_command,
    row,
    sentencepiece_model,
    texts_of,
    tokenizer,
    write,
)
from tests.runs import run, write_config
from tools.huggingface.checkpoint_reader import newest
from tools.huggingface.tokenizer import huggingface_files

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
CONFIG = {"bos_token": BOS, "eos_token": EOS, "model_max_length": 128}


@cache
def llama3() -> bytes:
    """A tokenizer.json like Llama 3's: byte-level BPE with the special tokens after all others. The
    file requests truncation."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = {"vocab_size": 500, "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(texts_of(SOURCE), tokenizers.trainers.BpeTrainer(**size))
    made.add_special_tokens([BOS, EOS, "<|eot_id|>"])
    made.add_tokens([AddedToken("<think>", special=False)])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        f"{BOS} $A", special_tokens=[(BOS, made.token_to_id(BOS))]
    )
    made.enable_truncation(16)
    return made.to_str().encode()


def make(folder: Path, config: dict[str, Any] | None = None, **files: str) -> Path:
    """Write llama3() and what is beside it; `files` are JSON files by their names."""
    if config is not None:
        files["tokenizer_config"] = json.dumps(config)
    return write(folder, {JSON: llama3()} | {f"{name}.json": files[name] for name in files})


def encoded(loaded: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in loaded.encode_arrays(texts)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "llama3", CONFIG)


def test_bos_begins_a_prompt_as_the_tokenizer_s_configuration_says(tmp_path: Path) -> None:
    """A prompt begins with bos if add_bos_token says so, or without that key if the post-processor
    adds it (transformers 5 considers only the latter)."""
    plain = json.dumps(json.loads(llama3()) | {"post_processor": None})
    for content, told, expected in (
        (llama3().decode(), {}, True),
        (plain, {}, False),
        (llama3().decode(), {"add_bos_token": False}, False),
        (plain, {"add_bos_token": True}, True),
    ):
        found = Tokenizer.load(make(tmp_path, CONFIG | told, tokenizer=content))
        assert found.adds_bos == expected, told
        assert found.encode("a") == Tokenizer({JSON: llama3()}).encode("a")  # without bos


@pytest.mark.parametrize("file", [JSON, MODEL])
def test_text_is_kept(folder: Path, file: str) -> None:
    """Whatever it spells, and although the tokenizer.json asks to cut it after 16 tokens."""
    loaded = Tokenizer.load(folder) if file == JSON else tokenizer()
    for name, text in HOSTILE.items():
        ids = loaded.encode(text)
        assert loaded.decode(ids) == text, name
        assert encoded(loaded, [text, "x"]) == [ids, loaded.encode("x")]
        assert all(0 <= token < loaded.vocab_size for token in ids)
        assert not {loaded.unk_id, *loaded.control_ids} & set(ids), name
    # what has no text: control tokens, and ids beyond the vocabulary, from a model's padding rows
    ids = [loaded.bos_id, *loaded.encode("\tx"), loaded.eos_id, loaded.vocab_size + 96]
    assert loaded.decode(ids) == "\tx"
    assert loaded.decode(loaded.encode("a\ud800b\udfff 🐍")) == "a\ufffdb\ufffd 🐍"


MAP = "special_tokens_map"
# its configuration, other files beside a tokenizer.json → bos and eos, or why it is refused
BESIDE: dict[str, tuple[dict[str, Any] | None, dict[str, str], tuple[int, int] | str]] = {
    "as objects": ({"bos_token": {"content": BOS}, "eos_token": {"content": "<|eot_id|>"}}, {},
                   (500, 502)),
    "no bos": ({"bos_token": None, "eos_token": EOS}, {}, (-1, 501)),
    "by their names": (None, {}, (500, 501)),
    "null in one": ({"bos_token": None, "eos_token": EOS}, {MAP: json.dumps(CONFIG)}, (500, 501)),
    "a file that transformers does not read": (
        CONFIG | {"added_tokens_decoder": {}}, {MAP: '{"eos_token": "<eos>"}'}, (500, 501)),
    "no eos": ({"eos_token": None}, {}, "no file names the token that ends documents"),
    "unknown eos": ({"eos_token": "<end>"}, {}, "no token '<end>'"),
    "no JSON": (None, {MAP: "{"}, "special_tokens_map.json beside it is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_who_says_what_begins_and_ends(tmp_path: Path, name: str) -> None:
    config, others, expected = BESIDE[name]
    path = make(tmp_path, config, **others)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            Tokenizer.load(path)
    else:
        loaded = Tokenizer.load(path, check_beside=True)
        assert (loaded.bos_id, loaded.eos_id) == expected


def test_the_file_chooses_and_the_digest_covers_what_decides(folder: Path, tmp_path: Path) -> None:
    one = Tokenizer.load(folder)
    assert list(one.files) == [JSON, "tokenizer_config.json"]
    assert Tokenizer.load(folder / JSON).sha256 == one.sha256 == Tokenizer(one.files).sha256
    other_name = tmp_path / "any.bin"
    other_name.write_bytes(llama3())
    # recognised by its content, and loaded without other files in its folder
    assert Tokenizer.load(other_name).files == {JSON: llama3()}
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert Tokenizer.load(folder).sha256 == one.sha256, "a template does not affect ids"
    make(folder, CONFIG | {"eos_token": "<|eot_id|>"})
    assert Tokenizer.load(folder).sha256 != one.sha256, "the token that ends documents does"
    (folder / MODEL).write_bytes(tokenizer().model)
    with pytest.raises(UserError, match=r"bos_token is '<s>', and .* names '<\|begin_of_text\|>'"):
        Tokenizer.load(folder, check_beside=True)
    assert Tokenizer.load(folder).sha256 == tokenizer().sha256, "of a run that has these files"
    make(folder, {"bos_token": "", "eos_token": {"content": "</s>"}})
    with pytest.raises(UserError, match=r"tokenizer.json, and tokenizer.model would spell it"):
        Tokenizer.load(folder, check_beside=True)
    both = Tokenizer.load(folder)
    assert both.sha256 == tokenizer().sha256 == hashlib.sha256(tokenizer().model).hexdigest()
    # the other files are kept too
    assert list(both.files) == [MODEL, "tokenizer_config.json", "chat_template.jinja", JSON]
    (folder / JSON).unlink()
    text = '{"eos_token": "<|im_end|>"}'  # as models of chats have
    (folder / "tokenizer_config.json").write_text(text)
    assert Tokenizer.load(folder, check_ids=True).sha256 == tokenizer().sha256
    with pytest.raises(UserError, match=r"eos_token is '</s>', and .* names '<\|im_end\|>'"):
        Tokenizer.load(folder, check_beside=True)


# --- our own tokenizer ----------------------------------------------------------------------------


def test_control_the_libraries_by_themselves_do_not_keep_text() -> None:
    """Control: the hostile strings find a tokenizer that alters text, here SentencePiece with its
    default settings, and one that finds control tokens in a text, and cuts it."""
    plain = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    lost = {name for name, text in HOSTILE.items() if plain.decode(plain.encode(text)) != text}
    assert lost >= {"tabs", "spaces around", "trailing newlines", "SentencePiece's space",
                    "compatibility forms"}  # fmt: skip
    ours = sentencepiece.SentencePieceProcessor(model_proto=tokenizer().model)
    assert ours.decode(ours.encode("a\u2581b")) == "a b", "without our spelling of the mark"
    raw = tokenizers.Tokenizer.from_str(llama3().decode())
    assert len(raw.encode("x\n" * 50).ids) == 16
    raw.no_truncation()
    found = raw.encode(HOSTILE["control tokens of Llama 3"], add_special_tokens=False).ids
    assert {500, 501, 502} <= {*found} & {*Tokenizer({JSON: llama3()}).control_ids}


def test_training_is_deterministic_and_reaches_the_size() -> None:
    texts = texts_of(MANY)
    one, two = Tokenizer.train(texts, 500), Tokenizer.train(texts, 500)
    assert one.sha256 == two.sha256
    assert one.vocab_size == 500
    assert one.sha256 != Tokenizer.train(texts[:-5], 500).sha256
    # every digit and every newline is a token of its own
    assert len(one.encode("20261121")) == 8
    assert one.encode("a\n\nb")[1:3] == one.encode("\n") * 2
    # also on a line of more than 2**20 bytes
    line = "the quick brown fox jumps over a lazy dog " * 30_000
    assert Tokenizer.train([line], 300).vocab_size == 300


def test_training_refuses() -> None:
    for size, other in ((4000, r"a value <= (\d+)"), (100, r"100 vs (\d+)")):
        with pytest.raises(UserError, match="--vocab-size") as raised:
            Tokenizer.train(["hello world"], size)
        works = int(re.findall(other, raised.value.why)[0])
        assert Tokenizer.train(["hello world"], works).vocab_size == works
    with pytest.raises(UserError, match="--source"):
        Tokenizer.train([], 300)


# --- in data and checkpoints ----------------------------------------------------------------------


def first_document(folder: Path) -> np.ndarray:
    shard = safetensors.numpy.load_file(folder / "train-00000.safetensors")
    return shard["tokens"][: shard["document_starts"][1]]


def test_data_and_checkpoints_take_a_tokenizer_json_along(folder, ranks, tmp_path) -> None:
    """The command prepares data with a tokenizer.json in several processes. The prepared folder and
    a checkpoint contain all its files, with checksums. The model may have more rows than the
    tokenizer has tokens."""
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    out = tmp_path / "out"
    assert prepare_by_command(MANY, folder / JSON, out, "--workers", "2") == 0
    loaded = Tokenizer.load(out)
    assert loaded.files == Tokenizer.load(folder).files
    config = DataConfig(path=str(out), tokenizer=str(folder / JSON), document_mask=True)
    data = open_data(config, "train")
    assert (data.vocab_size, data.bos_id, data.tokenizer_path) == (504, 500, out / JSON)
    first = first_document(out).tolist()
    assert (first[0], first[-1]) == (500, 501)
    assert loaded.decode(first) in texts_of(MANY)
    model = {"num_layers": 1, "vocab_size": 600}
    saved = {"train": {"steps": 1}, "checkpoint": {"interval": 1}}
    run(ranks, 1, write_config(tmp_path, out, model=model, **saved))
    checkpoint = newest(tmp_path / "run")
    assert Tokenizer.load(checkpoint).files == loaded.files
    assert loaded.files.keys() <= read_manifest(checkpoint).files.keys()


@pytest.mark.parametrize("bos", [None, EOS])
def test_documents_without_a_bos_of_their_own(bos: str | None, tmp_path: Path) -> None:
    """Like Qwen's, or GPT-2's: the token that is bos and eos stands once between documents."""
    loaded = Tokenizer.load(make(tmp_path / "files", {"bos_token": bos, "eos_token": EOS}))
    index = prepare(MANY, loaded, tmp_path / "out")
    assert index["bos_id"] == (-1 if bos is None else 501)
    first = first_document(tmp_path / "out").tolist()
    assert first[-1] == 501
    assert first[:-1] == loaded.encode(loaded.decode(first))
    source = open_data(DataConfig(path=str(tmp_path / "out")), "train").sources[0]
    ends = np.flatnonzero(source.window(0, source.num_tokens) == 501)
    assert len(ends) == index["splits"]["train"]["documents"]
    assert np.diff(ends).min() > 1


# --- for Hugging Face's tools ---------------------------------------------------------------------


def theirs_of(ours: Tokenizer, folder: Path) -> Any:
    """What transformers loads from the files that we write to `folder`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(write(folder, huggingface_files(ours, 100_000)))


RECORDED = json.loads((ROOT / "tests/fixtures" / "llama_cpp.json").read_text())


@pytest.mark.parametrize("name", RECORDED["models"])
def test_other_programs_read_the_tokens_that_were_trained(name: str, tmp_path: Path) -> None:
    """transformers and llama.cpp read from an export the ids with which the model was trained: the
    fixture has those of llama.cpp, and the commands that made them."""
    recorded = RECORDED["models"][name]
    ours = Tokenizer({MODEL: base64.b64decode(recorded["model"])})
    expected = [[ours.bos_id, *ids] for ids in encoded(ours, RECORDED["texts"])]
    assert recorded["tokens"] == expected
    assert [ours.decode(ids) for ids in expected] == RECORDED["texts"]
    theirs, made = theirs_of(ours, tmp_path), Tokenizer.load(tmp_path / JSON)
    assert (made.bos_id, made.eos_id, made.vocab_size) == (1, 2, ours.vocab_size)
    for text, ids in zip(RECORDED["texts"], expected, strict=True):
        assert (made.encode(text), made.decode(ids)) == (ids[1:], text)
        if "</s>" not in text:  # transformers reads control tokens in texts
            assert (theirs.encode(text), theirs.decode(ids[1:])) == (ids, text)
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    begins_with_space = "dummy prefix" in name
    assert said.get("add_prefix_space", True) == begins_with_space
    # control: without that key, llama.cpp reads others
    assert (recorded["tokens_without_add_prefix_space"] == expected) == begins_with_space


def test_files_that_were_there_stay(folder: Path, tmp_path: Path) -> None:
    """What a tokenizer_config.json lacks is added, and what it says is kept. A SentencePiece model
    that normalises text is not converted to tokenizer.json, because a probe finds that the result
    would differ."""
    given = {"chat_template": "{{ messages }}", "add_bos_token": False, "model_max_length": 7}
    told = {"tokenizer_config.json": json.dumps(given).encode()}
    theirs = theirs_of(Tokenizer({MODEL: tokenizer().model, **told}), tmp_path)
    assert given.items() <= json.loads((tmp_path / "tokenizer_config.json").read_text()).items()
    assert theirs.encode("def f") == tokenizer().encode("def f")
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (1, 2, 0)
    loaded = Tokenizer.load(folder)
    assert huggingface_files(loaded, 32) == loaded.files
    alone = huggingface_files(Tokenizer({JSON: llama3()}), 32)
    assert json.loads(alone["tokenizer_config.json"])["bos_token"] == BOS
    normalising = Tokenizer({MODEL: sentencepiece_model(byte_fallback=True)})
    assert list(huggingface_files(normalising, 32)) == [MODEL]


# --- what a text says -----------------------------------------------------------------------------


STRUCTURE = "a <s>struck out</s> b<s></s><unk><pad> 漢 <|im_end|>x"


def converted(model: bytes, folder: Path) -> bytes:
    """The tokenizer.json that transformers makes from a Unigram model."""
    from transformers.convert_slow_tokenizer import SpmConverter

    class Converter(SpmConverter):
        handle_byte_fallback = b"<0x00>" in model

    (folder / MODEL).write_bytes(model)
    wanted = SimpleNamespace(vocab_file=str(folder / MODEL), add_prefix_space=True, legacy=False)
    return Converter(wanted).converted().to_str().encode()


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_a_text_is_what_sentencepiece_reads(byte_fallback: bool, tmp_path: Path) -> None:
    """A tokenizer.json made from a SentencePiece model gives its ids, also for texts that spell
    control tokens."""
    options = {"byte_fallback": byte_fallback, "control_symbols": "<|im_end|>"}
    model = sentencepiece_model("unigram", **options)
    made = converted(model, tmp_path)
    loaded, same = Tokenizer({JSON: made}), Tokenizer({MODEL: model})
    texts = [STRUCTURE, HOSTILE["emoji"], *texts_of(SOURCE)]
    expected = sentencepiece.SentencePieceProcessor(model_proto=model).encode(texts)
    assert encoded(loaded, texts) == encoded(same, texts) == expected
    assert loaded.control_ids == same.control_ids == [1, 2, 3]
    assert loaded.unk_id == same.unk_id == 0
    assert not {1, 2, 3} & set(expected[0])
    raw = tokenizers.Tokenizer.from_str(made.decode())  # control: the library by itself
    raw.encode_special_tokens = True
    assert {1, 2} <= set(raw.encode(STRUCTURE, add_special_tokens=False).ids)


LETTERS = {letter: number for number, letter in enumerate("<s>/abcdef ")}
ENDS = {"<s>": 20, "</s>": 21, "<unk>": 22}
WORDS = LETTERS | ENDS
PARTS = WORDS | {"</": 11, "</s": 12}
MERGES = [("<", "/"), ("</", "s"), ("</s", ">")]


def made(model: models.Model, *, split: bool = True, lower: bool = False, **added: bool) -> bytes:
    """A tokenizer.json whose control tokens are only in the model's vocabulary, or, with flags in
    `added`, among the added tokens too."""
    built = tokenizers.Tokenizer(model)
    built.decoder = decoders.Fuse()
    if split:
        built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if lower:
        built.normalizer = tokenizers.normalizers.Lowercase()
    if added:
        built.add_tokens([AddedToken(name, **added) for name in ENDS])
    return built.to_str().encode()


KINDS = {
    "BPE": made(models.BPE(PARTS, MERGES, unk_token="<unk>")),
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


def test_no_control_token_is_written_into_a_document(tmp_path: Path) -> None:
    """Whatever a tokenizer does: preparation counts them."""
    writer = _SplitWriter(tmp_path, "train", np.dtype("uint16"), tokenizer(), 1 << 20)
    bos, eos = tokenizer().bos_id, tokenizer().eos_id

    def document(*text: int) -> Encoded:
        return Encoded([np.array([bos, *text, eos], np.uint16)], {"documents": 1}, None)

    writer.append(document(300))
    for token in (bos, eos):
        with pytest.raises(UserError, match=f"its control token {token} in a document's text"):
            writer.append(document(300, token))
        writer.histogram[token] -= 1
    # an eos that is the unknown token too is not counted as one
    end = "<|endoftext|>"
    built = tokenizers.Tokenizer(models.BPE(LETTERS | {end: 20}, [], unk_token=end))
    built.add_special_tokens([end])
    loaded = Tokenizer({JSON: built.to_str().encode()})
    writer = _SplitWriter(tmp_path, "heldout", np.dtype("uint16"), loaded, 1 << 20)
    writer.append(Encoded([np.array([4, 20], np.uint16)], {"documents": 1}, None))
    writer.close()
    assert (loaded.unk_id, loaded.eos_id, writer.counts["unknown_tokens"]) == (20, 20, 0)


# --- text that is not kept ------------------------------------------------------------------------

TEXT = "A\u00ef costs 5 \u20ac \u2014 \u6f22!"  # ï, €, —, 漢
# without an unknown token
LOWER = models.BPE({c: i for i, c in enumerate(sorted({*TEXT.lower(), *"abcdef"}))}, [])
# tokenizer → unknown tokens, changed documents of three, what TEXT becomes
LOSSES = {  # files of a tokenizer, unknown tokens, documents that change, what TEXT becomes
    "unknown": (lambda: {MODEL: sentencepiece_model("unigram")}, 4, 2,
                "A \u2047  costs 5  \u2047   \u2047 "),
    "normalized": (lambda: {JSON: made(LOWER, split=False, lower=True, special=True)}, 0, 2,
                   TEXT.lower()),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_text_that_is_not_kept_is_counted(name: str, tmp_path: Path, capsys) -> None:
    """(Of a tokenizer that keeps all text, nothing is said: test_data_prepare.py.)"""
    files, unknown, changed, became = LOSSES[name]
    write(tmp_path, {"a.jsonl": row(TEXT) + row("\uff21") + row("abc def")})
    folder, out = write(tmp_path / "files", files()), tmp_path / "out"
    assert prepare_by_command(tmp_path / "a.jsonl", folder, out, "--heldout-fraction", "0") == 0
    said = capsys.readouterr().out
    index = json.loads((out / "index.json").read_text())
    expected = {"checked": 3, "changed": changed, "example": [TEXT, became]}
    assert index["text_not_kept"] == {"unknown_tokens": unknown} | expected
    assert f"{unknown} unknown tokens; {changed} of 3 documents checked do not decode" in said
    assert f"{TEXT!r} became {became!r}" in said


def test_a_tokenizer_that_has_no_tokens_for_a_text_is_refused(tmp_path, capsys, monkeypatch):
    """Also where a worker process finds it. A machine without memory is no tokenizer's fault."""
    made = tokenizers.Tokenizer(models.Unigram([("a", -1.0)], None, byte_fallback=False))
    made.add_special_tokens(["<s>", "</s>"])
    write(tmp_path, {JSON: made.to_str(), "a.txt": TEXT})
    assert prepare_by_command(tmp_path / "a.txt", tmp_path / JSON, tmp_path / "out") == 2
    assert "it cannot encode a text: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    loaded = Tokenizer.load(tmp_path / JSON)
    monkeypatch.setattr(loaded._codec, "_encoder", Mock(**{"encode.side_effect": MemoryError}))
    with pytest.raises(MemoryError):
        loaded.encode("a")
