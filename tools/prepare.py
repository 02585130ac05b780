"""Tokenizes text: `python -m tools.prepare --source NAME_OR_PATH --tokenizer FILE --out DIR`.

--source: `python-stdlib`, a file, a 'glob' or a folder of text (.txt, .md, .py, …) and tables
(.jsonl, .csv, .parquet, …), also compressed (.gz, .bz2, .xz, .zst), or a data set of the Hugging
Face hub; or several of these. See data/sources.py. What is left out is reported. Training reads the
token shards in DIR as `data.path`. data/prepare.py describes the folder's contents.
"""

import os
import signal
import sys
import time
from pathlib import Path

from data.files import Report
from data.prepare import prepare
from data.tokenizer import Tokenizer
from tools.command import CommandParser, at_least, duration, reports_errors, run_command


def add_source_options(parser: CommandParser) -> None:
    """The options of a command that reads documents."""
    parser.required("--source", str, "SOURCE", "where the text comes from", nargs="+")
    parser.option("--text-field", "text", "NAME", "the column of a table that holds the text")
    split = "the split of a folder of tables or a Hugging Face data set"
    parser.option("--split", "train", "NAME", split)
    skipped = "count and leave out, instead of refusing: rows without the column of the text "
    skipped += "(missing); damaged rows, and files from the damage on (damaged)"
    kinds = ["missing", "damaged"]
    parser.option("--skip", str, None, skipped, choices=kinds, default=[], nargs="+")


@reports_errors
def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(prog="python -m tools.prepare", description=__doc__)
    add_source_options(parser)
    tokenizer = "a SentencePiece model (tools.tokenizer trains one), a tokenizer.json, or a folder "
    tokenizer += "with either (a checkpoint)"
    parser.required("--tokenizer", str, "FILE", tokenizer)
    parser.required("--out", Path, "DIR", "the folder to write")
    heldout = "the fraction of documents (if there are few: of the end of each) held out of "
    heldout += "training; 0: none"
    parser.option("--heldout-fraction", 0.05, "X", heldout)
    parser.option("--shard-tokens", 1 << 27, "N", "tokens per file, held in memory")
    parser.option("--workers", os.cpu_count() or 1, "N", "tokenizing processes")
    parser.option("--overwrite", bool, None, "replace the folder if it exists")
    options = parser.parse_args(arguments)
    at_least(0, 1, heldout_fraction=options.heldout_fraction)
    at_least(1, shard_tokens=options.shard_tokens, workers=options.workers)
    started, report = time.monotonic(), Report(options.skip)
    index = prepare(
        options.source,
        Tokenizer.load(options.tokenizer, "--tokenizer", check_beside=True),
        options.out,
        text_field=options.text_field,
        split=options.split,
        heldout_fraction=options.heldout_fraction,
        shard_tokens=options.shard_tokens,
        workers=options.workers,
        overwrite=options.overwrite,
        report=report,
    )
    seconds = time.monotonic() - started
    for name, split in index["splits"].items():
        print(
            f"{name:8} {split['tokens']:>14,} tokens  {split['documents']:>10,} documents  "
            f"{len(split['shards']):>5} shards  "
            f"{split['utf8_bytes'] / max(split['tokens'], 1):.2f} bytes per token"
        )
    if report.lines():
        print("\n".join(report.lines()))
    if lost := index.get("text_not_kept"):
        before, after = lost["example"] or (None, None)
        print(
            f"the tokenizer does not keep all text: {lost['unknown_tokens']:,} unknown tokens; "
            f"{lost['changed']:,} of {lost['checked']:,} documents checked do not decode to what "
            "was read" + (f", for example {before!r} became {after!r}" if before else "")
        )
    if "heldout" in index:
        train, heldout = (split["characters"] for split in index["splits"].values())
        print(
            "there are too few documents to hold out whole ones, so the end of each is held out "
            f"for evaluation: {100 * heldout / (train + heldout):.3g}% of the text"
        )
    tokens = sum(split["tokens"] for split in index["splits"].values())
    print(
        f"{options.out} is complete: {tokens / seconds:,.0f} tokens/s in {duration(seconds)} with "
        f"{options.workers} workers"
    )
    if index["splits"]["heldout"]["tokens"] == 0:
        print(
            "nothing was held out: train with train.eval_interval=0, "
            "or prepare again with a larger --heldout-fraction"
        )


if __name__ == "__main__":
    # what was begun is removed, as after Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run_command(main)
