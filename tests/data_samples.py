"""Data for tests: tokenizers trained on source of the Python standard library, data sets prepared
from it, and how tests write and read sources."""

import io
import json
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import sentencepiece

from data.files import Report
from data.prepare import prepare
from data.sources import documents
from data.tokenizer import Tokenizer
from errors import UserError
from tools import prepare as prepare_command

STDLIB_FOLDER = Path(sysconfig.get_paths()["stdlib"])
SOURCE = str(STDLIB_FOLDER / "json")  # a handful of documents
MANY = str(STDLIB_FOLDER / "email")  # about thirty
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"  # of Git LFS
HOSTILE = {
    "empty": "",
    "NUL": "a\0b\0",
    "carriage returns": "a\r\nb\rc\n\r",
    "tabs": "\tif x:\n\t\treturn\t",
    "spaces around": "  a   b    ",
    "trailing newlines": "x\n\n\n",
    "SentencePiece's space": "\u2581a \u2581\u2581 b\u2581",
    "control tokens": "<s></s><unk><pad>",
    "control tokens of Llama 3": "one <|end_of_text|> two <|eot_id|><|begin_of_text|> <think>",
    "byte tokens": "<0x41><0xE2>",
    "byte order mark": "\ufeffx\ufeff",
    "combining, not composed": "e\u0301 \u00e9",
    "compatibility forms": "\ufb01 \u00bd \u2167 \uff21\uff22",
    "other spaces": "\u00a0\u3000\u2028\u2029\x85\x0b\x0c",
    "emoji": "👩‍👩‍👧‍👦🐍",
    "astral": "\U0010ffff\U00010000",
    "right to left": "\u202e\u05e9\u05dc\u05d5\u05dd",
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train((document.text for document in documents(MANY)), 800)


@cache
def other_tokenizer() -> Tokenizer:
    return Tokenizer.train(texts_of(SOURCE), 400)


@cache
def sentencepiece_model(model_type: str = "bpe", **options: object) -> bytes:
    """A model that SentencePiece trains on the lines of `SOURCE` with its own defaults."""
    lines = (line for text in texts_of(SOURCE) for line in text.split("\n"))
    out = io.BytesIO()
    options |= {"model_type": model_type, "vocab_size": 500, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=out, **options)
    return out.getvalue()


def prepared(out: Path, source: str = MANY, **options) -> Path:
    """Prepare `source` in `out`, in several small shards and with 30% of the documents held out;
    return `out`."""
    options = {"heldout_fraction": 0.3, "shard_tokens": 20_000} | options
    prepare(source, tokenizer(), out, **options)
    return out


def prepare_by_command(source: object, tokenizer: object, out: object, *options: str) -> int:
    """The exit status of tools.prepare, in one process unless `options` say otherwise."""
    named = {"--source": source, "--tokenizer": tokenizer, "--out": out, "--workers": 1}
    words = [str(word) for pair in named.items() for word in pair]
    return prepare_command.main([*words, *options])


def split_texts(folder: Path, split: str) -> list[str]:
    """The documents of a prepared split, read with the safetensors library and decoded."""
    texts = []
    for shard in json.loads((folder / "index.json").read_text())["splits"][split]["shards"]:
        tensors = safetensors.numpy.load_file(folder / shard["file"])
        assert tensors["tokens"].dtype == np.uint16
        assert tensors["document_starts"].dtype == np.int64
        counts = {name: len(tensor) for name, tensor in tensors.items()}
        assert counts == {"tokens": shard["tokens"], "document_starts": shard["documents"]}
        for ids in np.split(tensors["tokens"], tensors["document_starts"][1:]):
            assert (ids[0], ids[-1]) == (tokenizer().bos_id, tokenizer().eos_id)
            assert not {tokenizer().bos_id, tokenizer().eos_id} & set(ids[1:-1].tolist())
            texts.append(tokenizer().decode(ids))
    return texts


def texts_of(source: str, **options) -> list[str]:
    return [document.text for document in documents(source, **options)]


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def read(source: Path | str, skip: Sequence[str] = (), **options) -> tuple[list[str], dict]:
    """The texts, and the files left out by reason."""
    report = Report(skip)
    return texts_of(str(source), report=report, **options), report.left_out


def refusal(source: Path | str, **options) -> UserError:
    with pytest.raises(UserError) as raised:
        read(source, **options)
    return raised.value


def flip_a_bit(file: Path, at: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def row(text: object) -> str:
    return json.dumps({"text": text}) + "\n"
