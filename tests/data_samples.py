"""Real data for tests: a tokenizer trained on source of the Python standard library, and data sets
prepared from it."""

import sysconfig
from functools import cache
from pathlib import Path

from data.prepare import prepare
from data.sources import documents
from data.tokenizer import Tokenizer

STDLIB_FOLDER = Path(sysconfig.get_paths()["stdlib"])
SOURCE = str(STDLIB_FOLDER / "json")  # a handful of documents
MANY = str(STDLIB_FOLDER / "email")  # about thirty


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train((document.text for document in documents(MANY)), 800)


def prepared(out: Path, source: str = MANY, **options) -> Path:
    """Prepare `source` in `out`, in several small shards and with 30% of the documents held out;
    return `out`."""
    options = {"heldout_fraction": 0.3, "shard_tokens": 20_000} | options
    prepare(source, tokenizer(), out, **options)
    return out
