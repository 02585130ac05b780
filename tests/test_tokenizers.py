"""One interface for two tokenizer libraries (`tokenizer.json` and SentencePiece), chosen by the
file. Prepared data and checkpoints keep all of a tokenizer's files."""

import base64
import hashlib
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from data.config import DataConfig
from data.dataset import open_data
from data.prepare import prepare
from data.tokenizer import JSON, MODEL, Tokenizer
from errors import UserError
from runtime.checkpoints.manifest import read_manifest
from tests.data_samples import (
    HOSTILE,
    MANY,
    SOURCE,
    prepare_by_command,
    sentencepiece_model,
    texts_of,
    tokenizer,
)
from tests.runs import train_run, write_config
from tools.huggingface.checkpoint_reader import newest
from tools.huggingface.tokenizer import huggingface_files
from tools.ranks import Ranks

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


def write(folder: Path, config: dict[str, Any] | None = None, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON).write_bytes(llama3())
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "llama3", CONFIG)


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
    found = Tokenizer.load(write(tmp_path, config, tokenizer=json.dumps(content)))
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
    ids = loaded.encode("def f(x): return x\n" * 50)
    assert len(ids) > 16, "the file's truncation is not applied"
    assert loaded.decode([loaded.bos_id, *ids, loaded.eos_id]) == "def f(x): return x\n" * 50
    assert loaded.decode([*loaded.encode("x"), 504, 600]) == "x", (
        "ids beyond the vocabulary, from a model's padding rows, have no text"
    )
    assert tokenizer().decode([*tokenizer().encode("x"), tokenizer().vocab_size]) == "x"
    assert loaded.decode(loaded.encode("a\ud800b")) == "a\ufffdb"
    assert loaded.encode_arrays(["x"])[0].dtype == "int32"


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
    loaded = Tokenizer.load(write(tmp_path, config, **files), check_beside=True)
    assert (loaded.bos_id, loaded.eos_id) == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: write(f, {"eos_token": None}), "no file names the token that ends documents"),
        (lambda f: write(f, CONFIG | {"eos_token": "<end>"}), "no token '<end>'"),
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
    write(folder, CONFIG | {"eos_token": "<|eot_id|>"})
    assert Tokenizer.load(folder).sha256 != one.sha256, "the token that ends documents does"
    (folder / MODEL).write_bytes(tokenizer().model)
    with pytest.raises(UserError, match=r"bos_token is '<s>', and .* names '<\|begin_of_text\|>'"):
        Tokenizer.load(folder, check_beside=True)
    assert Tokenizer.load(folder).sha256 == tokenizer().sha256, "of a run that has these files"
    write(folder, {"bos_token": "", "eos_token": {"content": "</s>"}})
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
    config = DataConfig(str(out), tokenizer=str(folder / JSON), document_mask=True)
    data = open_data(config, "train")
    assert (data.vocab_size, data.bos_id, data.tokenizer_path) == (504, 500, out / JSON)
    source = data.sources[0]
    starts = source.document_starts(0)
    first = source.window(int(starts[0]), int(starts[1])).tolist()
    assert (first[0], first[-1]) == (500, 501)
    assert loaded.decode(first) in texts_of(MANY)


def test_documents_without_bos(tmp_path: Path) -> None:
    loaded = Tokenizer.load(write(tmp_path / "qwen", {"bos_token": None, "eos_token": EOS}))
    index = prepare(MANY, loaded, tmp_path / "out")
    assert index["bos_id"] == -1
    source = open_data(DataConfig(str(tmp_path / "out")), "train").sources[0]
    source.verify()
    starts = source.document_starts(0)
    first = source.window(0, int(starts[1])).tolist()
    assert first[-1] == 501
    assert first[:-1] == loaded.encode(loaded.decode(first))
    with pytest.raises(UserError, match="bos"):
        open_data(DataConfig(str(tmp_path / "out"), document_mask=True), "train")


def test_a_checkpoint_takes_it_along(folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint contains all files of the tokenizer with their checksums. The model may have
    more rows than the tokenizer has tokens, not fewer."""
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    data = tmp_path / "data"
    prepare(MANY, Tokenizer.load(folder), data)
    model, steps = {"num_layers": 1, "vocab_size": 600}, {"steps": 1}
    config = write_config(tmp_path, data, model=model, train=steps, checkpoint={"interval": 1})
    assert ranks.run(train_run, 1, [config]) == [""]
    checkpoint = newest(tmp_path / "run")
    loaded = Tokenizer.load(checkpoint)
    assert loaded.files == Tokenizer.load(folder).files
    assert loaded.files.keys() <= read_manifest(checkpoint).files.keys()
    fewer = ["model.vocab_size=503", f"run.dir={tmp_path / 'other'}"]
    (refusal,) = ranks.run(train_run, 1, [config, *fewer])
    assert refusal.startswith("model.vocab_size = 503: the data's tokenizer has 504 tokens")


# --- for Hugging Face's tools ---------------------------------------------------------------------


def theirs_of(ours: Tokenizer, folder: Path) -> Any:
    """What transformers loads from the files that we write to `folder`."""
    from transformers import AutoTokenizer

    for name, content in huggingface_files(ours, 100_000).items():
        (folder / name).write_bytes(content)
    return AutoTokenizer.from_pretrained(folder)


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


RECORDED = json.loads((Path(__file__).parent / "fixtures" / "llama_cpp.json").read_text())


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
