"""Trains a tokenizer: `python -m tools.tokenizer --source … --vocab-size N --out FILE`.

SentencePiece BPE that can spell every text exactly (data/sentencepiece_codec.py). It sees the training documents only, never
the held-out ones, and at most --max-characters of them from the start of the source: give a source that is mixed, not sorted.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from data.sources import documents, held_out
from data.tokenizer import Tokenizer
from errors import UserError


def texts(source: str, text_field: str, split: str, heldout_fraction: float, max_characters: int) -> Iterator[str]:
    """The training documents of `source` until `max_characters` characters are reached."""
    characters = 0
    for document in documents(source, text_field, split):
        if held_out(document.id, heldout_fraction):
            continue
        yield document.text
        characters += len(document.text)
        if characters >= max_characters:
            return


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.tokenizer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", required=True, help="where the text comes from, as for tools.prepare")
    parser.add_argument("--vocab-size", required=True, type=int, help="the number of tokens, bytes included")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the model to write")
    parser.add_argument("--text-field", default="text", help="the column that holds the text (default: %(default)s)")
    parser.add_argument("--split", default="train", help="which split of a Hugging Face data set (default: %(default)s)")
    parser.add_argument(
        "--heldout-fraction", type=float, default=0.05, help="as will be given to tools.prepare (default: %(default)s)"
    )
    parser.add_argument(
        "--max-characters", type=int, default=100_000_000, help="enough to learn from; held in memory (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        read = texts(options.source, options.text_field, options.split, options.heldout_fraction, options.max_characters)
        tokenizer = Tokenizer.train(read, options.vocab_size)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        partial = options.out.with_name(options.out.name + ".partial")
        partial.write_bytes(tokenizer.model)
        partial.replace(options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {tokenizer.vocab_size} tokens, sha256 {tokenizer.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
