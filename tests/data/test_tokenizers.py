"""One interface for two tokenizer libraries (`tokenizer.json` and SentencePiece), chosen by the
file, reproduces every text exactly. Prepared data and checkpoints keep all its files."""

import base64
import hashlib
import json
import random
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from data.config import DataConfig
from data.dataset import open_data
from data.prepare import prepare
from data.sources import STDLIB
from data.tokenizer import JSON, MODEL, Tokenizer
from errors import UserError
from proofs.ranks import Ranks
from runtime.checkpoint.manifest import read_manifest
from tests import ROOT
from tests.data_samples import (
    HOSTILE,
    MANY,
    SOURCE,
    prepare_by_command,
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
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts_of(SOURCE), trainer)
    made.add_special_tokens([BOS, EOS, "<|eot_id|>"])
    made.add_tokens([AddedToken("<think>", special=False)])
    made.post_processor = processors.TemplateProcessing(
        f"{BOS} $A", special_tokens=[(BOS, made.token_to_id(BOS))]
    )
    made.enable_truncation(16)
    return made.to_str().encode()


def make(folder: Path, config: dict[str, Any] | None = None, **others: str) -> Path:
    """Write llama3() and what is beside it; `others` are JSON files by their names."""
    files = {JSON: llama3()} | {f"{name}.json": content for name, content in others.items()}
    if config is not None:
        files["tokenizer_config.json"] = json.dumps(config)
    return write(folder, files)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "llama3", CONFIG)


@pytest.mark.parametrize(
    ("processor", "told", "expected"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
    ids=["processor", "no processor", "told not to", "told to"],
)
def test_bos_begins_a_prompt_as_the_tokenizer_s_configuration_says(
    tmp_path: Path, processor: bool, told: bool | None, expected: bool
) -> None:
    """A prompt begins with bos if add_bos_token says so, or without that key if the post-processor
    adds it (transformers 5 considers only the latter)."""
    content = json.loads(llama3())
    if not processor:
        content["post_processor"] = None
    config = CONFIG if told is None else CONFIG | {"add_bos_token": told}
    found = Tokenizer.load(make(tmp_path, config, tokenizer=json.dumps(content)))
    assert found.adds_bos == expected
    assert found.bos_id >= 0
    assert found.encode("a") == Tokenizer({JSON: llama3()}).encode("a")  # without bos


def test_our_own_tokenizer_adds_bos_unless_told_not_to() -> None:
    told = b'{"add_bos_token": false}'
    other = Tokenizer({MODEL: tokenizer().model, "tokenizer_config.json": told})
    assert (tokenizer().adds_bos, other.adds_bos) == (True, False)
    assert other.sha256 == tokenizer().sha256


@pytest.mark.parametrize("file", [JSON, MODEL])
@pytest.mark.parametrize("name", HOSTILE)
def test_text_is_kept(folder: Path, name: str, file: str) -> None:
    loaded, text = Tokenizer.load(folder) if file == JSON else tokenizer(), HOSTILE[name]
    ids = loaded.encode(text)
    assert loaded.decode(ids) == text
    assert loaded.encode_batch([text, "x"]) == [ids, loaded.encode("x")]
    assert all(0 <= token < loaded.vocab_size for token in ids)
    assert not {loaded.unk_id, loaded.bos_id, loaded.eos_id} & set(ids)


def test_ids_and_roles(folder: Path) -> None:
    loaded = Tokenizer.load(folder)
    assert loaded.vocab_size == 504
    assert (loaded.bos_id, loaded.eos_id) == (500, 501)
    assert len(loaded.encode("x\n" * 50)) > 16, "the file's truncation is not applied"
    assert loaded.encode_arrays(["x"])[0].dtype == "int32"


@pytest.mark.parametrize("file", [JSON, MODEL])
def test_what_has_no_text(folder: Path, file: str) -> None:
    loaded = Tokenizer.load(folder) if file == JSON else tokenizer()
    text = "def f():\n    pass\n"
    assert loaded.decode([loaded.bos_id, *loaded.encode(text), loaded.eos_id]) == text
    # ids beyond the vocabulary, from a model's padding rows
    beyond = [loaded.vocab_size, loaded.vocab_size + 96]
    assert loaded.decode([*loaded.encode("x"), *beyond]) == "x"
    assert loaded.decode(loaded.encode("a\ud800b\udfff 🐍")) == "a\ufffdb\ufffd 🐍"


def test_special_tokens_in_a_text_are_text(folder: Path) -> None:
    loaded = Tokenizer.load(folder)
    text = f"one {EOS} two <|eot_id|>{BOS} <think>"
    ids = loaded.encode(text)
    assert not {500, 501, 502} & set(ids)
    assert loaded.decode(ids) == text
    raw = tokenizers.Tokenizer.from_str(llama3().decode())  # control: the library by itself
    raw.no_truncation()
    assert {500, 501, 502} <= set(raw.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"bos_token": {"content": BOS}, "eos_token": {"content": "<|eot_id|>"}}, {}, (500, 502)),
        ({"bos_token": None, "eos_token": EOS}, {}, (-1, 501)),
        (None, {"special_tokens_map": json.dumps(CONFIG)}, (500, 501)),
        ({"model_max_length": 5}, {"special_tokens_map": json.dumps(CONFIG)}, (500, 501)),
        (None, {}, (500, 501)),
        ({"bos_token": "", "eos_token": ""}, {}, (500, 501)),
        ({"bos_token": None, "eos_token": EOS}, {"special_tokens_map": json.dumps(CONFIG)},
         (500, 501)),
        (CONFIG | {"added_tokens_decoder": {}}, {"special_tokens_map": '{"eos_token": "<eos>"}'},
         (500, 501)),
    ],
    ids=["as objects", "no bos", "special_tokens_map", "either", "by their names", "empty",
         "null in one", "a file that transformers does not read"],
)  # fmt: skip
def test_who_says_what_begins_and_ends(
    tmp_path: Path, config: dict | None, files: dict[str, str], expected: tuple
) -> None:
    loaded = Tokenizer.load(make(tmp_path, config, **files), check_beside=True)
    assert (loaded.bos_id, loaded.eos_id) == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: make(f, {"eos_token": None}), "no file names the token that ends documents"),
        (lambda f: make(f, CONFIG | {"eos_token": "<end>"}), "no token '<end>'"),
        (lambda f: (f / "tokenizer_config.json").write_text("{"),
         "tokenizer_config.json beside it is not JSON"),
    ],
    ids=["no eos", "unknown eos", "no JSON beside"],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(folder: Path, change: Any, said: str) -> None:
    change(folder)
    with pytest.raises(UserError, match=said):
        Tokenizer.load(folder)


def test_the_file_chooses_and_the_digest_covers_what_decides(folder: Path, tmp_path: Path) -> None:
    one = Tokenizer.load(folder)
    assert list(one.files) == [JSON, "tokenizer_config.json"]
    assert Tokenizer.load(folder / JSON).sha256 == one.sha256 == Tokenizer(one.files).sha256
    other_name = tmp_path / "any.bin"
    other_name.write_bytes(llama3())
    assert Tokenizer.load(other_name).files == {JSON: llama3()}, (
        "recognised by its content, and loaded without other files in its folder"
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert Tokenizer.load(folder).sha256 == one.sha256, "a template does not affect ids"
    make(folder, CONFIG | {"eos_token": "<|eot_id|>"})
    assert Tokenizer.load(folder).sha256 != one.sha256, "the token that ends documents does"
    (folder / MODEL).write_bytes(tokenizer().model)
    with pytest.raises(UserError, match=r"bos_token is '<s>', and .* names '<\|begin_of_text\|>'"):
        Tokenizer.load(folder, check_beside=True)
    assert Tokenizer.load(folder).sha256 == tokenizer().sha256, "of a run that has these files"
    make(folder, {"bos_token": "", "eos_token": {"content": "</s>"}})
    both = Tokenizer.load(folder, check_beside=True)
    assert both.sha256 == tokenizer().sha256 == hashlib.sha256(tokenizer().model).hexdigest()
    assert list(both.files) == [MODEL, "tokenizer_config.json", "chat_template.jinja", JSON], (
        "the other files are kept too"
    )


@pytest.mark.parametrize("text", ["def f():\n    return '漢字'\n", "  x", "a"])
def test_llama_2s_kind_of_sentencepiece(text: str) -> None:
    """A SentencePiece model that adds a space before each text, as Llama 2's, reproduces texts
    without that space."""
    model = sentencepiece_model(
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False
    )
    loaded = Tokenizer({MODEL: model})
    assert loaded.decode([loaded.bos_id, *loaded.encode(text), loaded.eos_id]) == text


# --- our own tokenizer ----------------------------------------------------------------------------


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.thorough), 10])
def test_stdlib_files_round_trip(every: int) -> None:
    texts = texts_of(STDLIB)[::every]
    assert sum(map(len, texts)) > 5_000_000 / every / 2
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


def test_broken_bytes_do_not_raise() -> None:
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
    [(["hello world"], 4000, "--vocab-size"), (["hello world"], 100, "--vocab-size"),
     ([], 300, "--source")],
    ids=["too large", "too small", "no text"],
)  # fmt: skip
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


# --- in data and checkpoints ----------------------------------------------------------------------


def test_prepare_with_a_tokenizer_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The command prepares data with a tokenizer.json in several processes, and the prepared folder
    contains all files of the tokenizer."""
    out = tmp_path / "out"
    said = prepare_by_command(MANY, folder / JSON, out, "--workers", "2")
    assert said == 0, capsys.readouterr().err
    loaded = Tokenizer.load(out)
    assert loaded.files == Tokenizer.load(folder).files
    config = DataConfig(path=str(out), tokenizer=str(folder / JSON), document_mask=True)
    data = open_data(config, "train")
    assert (data.vocab_size, data.bos_id, data.tokenizer_path) == (504, 500, out / JSON)
    source = data.sources[0]
    starts = source.document_starts(0)
    first = source.window(int(starts[0]), int(starts[1])).tolist()
    assert (first[0], first[-1]) == (500, 501)
    assert loaded.decode(first) in texts_of(MANY)


def test_documents_without_bos(tmp_path: Path) -> None:
    loaded = Tokenizer.load(make(tmp_path / "qwen", {"bos_token": None, "eos_token": EOS}))
    index = prepare(MANY, loaded, tmp_path / "out")
    assert index["bos_id"] == -1
    source = open_data(DataConfig(path=str(tmp_path / "out")), "train").sources[0]
    source.verify()
    starts = source.document_starts(0)
    first = source.window(0, int(starts[1])).tolist()
    assert first[-1] == 501
    assert first[:-1] == loaded.encode(loaded.decode(first))
    with pytest.raises(UserError, match="bos"):
        open_data(DataConfig(path=str(tmp_path / "out"), document_mask=True), "train")


def test_a_checkpoint_takes_it_along(folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint contains all files of the tokenizer with their checksums. The model may have
    more rows than the tokenizer has tokens."""
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    data = tmp_path / "data"
    prepare(MANY, Tokenizer.load(folder), data)
    model, steps = {"num_layers": 1, "vocab_size": 600}, {"steps": 1}
    config = write_config(tmp_path, data, model=model, train=steps, checkpoint={"interval": 1})
    run(ranks, 1, config)
    checkpoint = newest(tmp_path / "run")
    loaded = Tokenizer.load(checkpoint)
    assert loaded.files == Tokenizer.load(folder).files
    assert loaded.files.keys() <= read_manifest(checkpoint).files.keys()


# --- for Hugging Face's tools ---------------------------------------------------------------------


def theirs_of(ours: Tokenizer, folder: Path) -> Any:
    """What transformers loads from the files that we write to `folder`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(write(folder, huggingface_files(ours, 100_000)))


def test_our_sentencepiece_as_tokenizer_json(tmp_path: Path) -> None:
    """Our SentencePiece model converted to tokenizer.json gives the same ids in the tokenizers
    library, in transformers and here."""
    texts = texts_of(MANY) + [text for text in HOSTILE.values() if "\u2581" not in text]
    expected = tokenizer().encode_batch(texts)
    theirs = theirs_of(tokenizer(), tmp_path)
    other = Tokenizer.load(tmp_path / JSON)
    assert other.encode_batch(texts) == expected
    assert (other.bos_id, other.eos_id, other.vocab_size) == (1, 2, tokenizer().vocab_size)
    assert [other.decode(ids) for ids in expected] == texts
    for text, ids in zip(texts, expected, strict=True):
        if "</s>" not in text:  # transformers reads it as a control token
            assert (theirs.encode(text), theirs.decode(ids)) == ([1, *ids], text)


RECORDED = json.loads((ROOT / "tests/fixtures" / "llama_cpp.json").read_text())


@pytest.mark.parametrize("name", RECORDED["models"])
def test_other_programs_read_the_tokens_that_were_trained(name: str, tmp_path: Path) -> None:
    """transformers and llama.cpp read from an export the ids with which the model was trained: the
    fixture has those of llama.cpp, and the commands that made them."""
    recorded = RECORDED["models"][name]
    ours = Tokenizer({MODEL: base64.b64decode(recorded["model"])})
    expected = [[ours.bos_id, *ids] for ids in ours.encode_batch(RECORDED["texts"])]
    assert recorded["tokens"] == expected
    theirs = theirs_of(ours, tmp_path)
    for text, ids in zip(RECORDED["texts"], expected, strict=True):
        if "</s>" not in text:  # transformers reads control tokens in texts
            assert theirs.encode(text) == ids, text
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    begins_with_space = "dummy prefix" in name
    assert said.get("add_prefix_space", True) == begins_with_space
    # control: without that key, llama.cpp reads others
    assert (recorded["tokens_without_add_prefix_space"] == expected) == begins_with_space


def test_what_a_tokenizer_config_lacks_is_written(tmp_path: Path) -> None:
    """Also beside a tokenizer_config.json that is there, which keeps what it says."""
    given = {"chat_template": "{{ messages }}", "add_bos_token": False, "model_max_length": 7}
    told = {"tokenizer_config.json": json.dumps(given).encode()}
    theirs = theirs_of(Tokenizer({MODEL: tokenizer().model, **told}), tmp_path)
    assert given.items() <= json.loads((tmp_path / "tokenizer_config.json").read_text()).items()
    assert theirs.encode("def f") == tokenizer().encode("def f")
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (1, 2, 0)


def test_a_model_that_no_tokenizer_json_can_be_is_left_as_it_is() -> None:
    """A SentencePiece model that normalises text is not converted to tokenizer.json, because a
    probe finds that the result would differ."""
    ours = Tokenizer({MODEL: sentencepiece_model(byte_fallback=True)})
    assert list(huggingface_files(ours, 32)) == [MODEL]


def test_files_that_were_there_stay(folder: Path) -> None:
    loaded = Tokenizer.load(folder)
    assert huggingface_files(loaded, 32) == loaded.files
    shutil.copy(folder / JSON, folder / "alone.json")
    alone = huggingface_files(Tokenizer.load(folder / "alone.json"), 32)
    assert json.loads(alone["tokenizer_config.json"])["bos_token"] == BOS
