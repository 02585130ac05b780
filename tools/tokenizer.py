"""Trains a tokenizer: `python -m tools.tokenizer --source … --vocab-size N --out FILE`.

    python -m tools.tokenizer --source 'corpus/*.jsonl' --vocab-size 32000 --out corpus.model

The tokenizer is a SentencePiece BPE model that reproduces every text exactly
(data/sentencepiece_codec.py). It is trained only on training documents, never on held-out ones, and
on about --max-characters from the start of the source; so the source should be mixed, not sorted.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from data.files import Report
from data.heldout import Splitter
from data.sources import documents
from data.tokenizer import Tokenizer
from errors import UserError, exists, is_file
from tools.command import CommandParser, at_least, reports_errors, run_command, writes
from tools.prepare import add_source_options


def texts(options: argparse.Namespace, report: Report) -> Iterator[str]:
    """Yields the training text of the source, until --max-characters are reached."""
    characters = 0
    source = documents(options.source, options.text_field, options.split, report)
    for part in Splitter(source, options.heldout_fraction):
        if part.held_out:
            continue
        yield part.text
        characters += len(part.text)
        if characters >= options.max_characters:
            return


def check_out(out: Path) -> None:
    """Raises UserError unless `out` is a new file or a tokenizer's."""
    try:
        may_write = not exists(out) or (is_file(out) and Tokenizer.load(out))
    except UserError:
        may_write = False
    if not may_write:
        why = "it exists and is not a tokenizer's file"
        raise UserError("--out", str(out), why, "give another name; only such a file is replaced")


@reports_errors
def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(prog="python -m tools.tokenizer", description=__doc__)
    add_source_options(parser)
    parser.required("--vocab-size", int, "N", "the number of tokens, bytes included")
    parser.required("--out", Path, "FILE", "the model to write")
    parser.option("--heldout-fraction", 0.05, "X", "the value that tools.prepare will get")
    parser.option("--max-characters", 100_000_000, "N", "to train on, held in memory")
    options = parser.parse_args(arguments)
    report = Report(options.skip)
    at_least(1, max_characters=options.max_characters)
    at_least(0, 1, heldout_fraction=options.heldout_fraction)
    check_out(options.out)
    with writes("--out", options.out):
        options.out.parent.mkdir(parents=True, exist_ok=True)
        partial = options.out.parent / f"{options.out.name}.partial"
        try:
            partial.touch()  # what cannot be written is refused before training, not after
            partial.unlink()  # a training that is killed leaves nothing
            tokenizer = Tokenizer.train(texts(options, report), options.vocab_size)
            partial.write_bytes(tokenizer.model)
            partial.replace(options.out)
        finally:
            partial.unlink(missing_ok=True)
    if report.lines():
        print("\n".join(report.lines()))
    print(f"{options.out}: {tokenizer.vocab_size} tokens, sha256 {tokenizer.sha256}")


if __name__ == "__main__":
    run_command(main)
