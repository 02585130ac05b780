"""Real data for the tests of data/: a tokenizer trained on this Python's own source, and a prepared
folder made from it."""

import sysconfig
from functools import cache
from pathlib import Path

from data.prepare import prepare
from data.sources import documents
from data.tokenizer import Tokenizer

STDLIB_FOLDER = Path(sysconfig.get_paths()["stdlib"])
SOURCE = str(STDLIB_FOLDER / "json")  # a handful of documents of real text, and `email` about forty
MANY = str(STDLIB_FOLDER / "email")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train((document.text for document in documents(MANY)), 800)


def prepared(out: Path, source: str = MANY, **options) -> Path:
    """`out`, with `source` prepared in several small shards and a third of the documents held
    out."""
    options = {"heldout_fraction": 0.3, "shard_tokens": 20_000} | options
    prepare(source, tokenizer(), out, **options)
    return out
