"""Continues text with a trained model: `python -m tools.generate --checkpoint DIR --prompt TEXT
[--max-new-tokens N] …`

DIR is a checkpoint, a run folder (its newest checkpoint is used) or an exported folder in Hugging
Face format. The text of a single prompt is printed as it is generated. Several prompts (repeat
`--prompt`, or give `--prompts FILE`) are computed in batches, and each batch is printed when it is
complete. With several processes, the model is sharded over all of them by tensor parallelism,
whatever layout trained it:

    torchrun --nproc-per-node 2 -m tools.generate --checkpoint DIR --prompt TEXT

Keys and values of earlier tokens are cached (cache.py), so each new token costs the computation of
one token. A checkpoint's checksums are verified first, as by tools.verify, and a damaged one is
refused.
"""

import argparse
import sys
from pathlib import Path

import torch.distributed as dist

from errors import UserError
from runtime.agreement import from_rank_0, on_all_ranks
from runtime.exit import refuse
from runtime.start.init import init_distributed
from settings.precision import DTYPES
from tools.command import CommandParser, at_least, run_command
from tools.generate.load_model import load_model
from tools.generate.loop import continue_texts
from tools.generate.sampling import Sampling


def read_options(options: argparse.Namespace) -> tuple[list[str], Sampling]:
    """The prompts, and how to sample. Raises UserError for an invalid option."""
    at_least(0, max_new_tokens=options.max_new_tokens)
    at_least(1, batch_size=options.batch_size)
    prompts = list(options.prompt)
    if options.prompts is not None:
        try:
            prompts += [
                line for line in options.prompts.read_text(encoding="utf-8-sig").split("\n") if line
            ]
        except (OSError, UnicodeDecodeError) as error:
            why = f"it cannot be read: {error}"
            remedy = "give a UTF-8 file with one prompt per line"
            raise UserError("--prompts", str(options.prompts), why, remedy) from None
    if not prompts:
        why = "there is nothing to continue"
        raise UserError("--prompt", None, why, "give --prompt TEXT, or --prompts FILE")
    return prompts, Sampling(options.temperature, options.top_k, options.top_p, options.seed)


def run(options: argparse.Namespace, device: str) -> None:
    """Generates the text. Runs on every rank; rank 0 writes to standard output. Raises the same
    UserError on all ranks."""
    prompts, sampling = from_rank_0(lambda: read_options(options), device)
    loaded = load_model(options.checkpoint, DTYPES[options.dtype], device)
    encoded = on_all_ranks(
        lambda: [loaded.encode(prompt, options.bos) for prompt in prompts], device
    )

    def log(text: str) -> None:
        if dist.get_rank() == 0:
            sys.stdout.write(text)
            sys.stdout.flush()

    if len(prompts) == 1:
        log(prompts[0])
        for _, piece in continue_texts(loaded, encoded, options.max_new_tokens, sampling):
            log(piece)
        log("\n")
        return
    for first in range(0, len(prompts), options.batch_size):
        batch = slice(first, first + options.batch_size)
        texts = prompts[batch]
        for row, piece in continue_texts(
            loaded, encoded[batch], options.max_new_tokens, sampling, first
        ):
            texts[row] += piece
        log("".join(f"--- {number}\n{text}\n" for number, text in enumerate(texts, first + 1)))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m tools.generate", description=__doc__)
    add, repeated = parser.option, {"action": "append", "default": []}
    parser.required("--checkpoint", Path, "DIR", "a checkpoint, run folder or exported folder")
    add("--prompt", str, "TEXT", "the text to continue; may be repeated", **repeated)
    add("--prompts", Path, "FILE", "more prompts, one per line")
    add("--batch-size", 16, "N", "prompts computed together")
    add("--max-new-tokens", 128, "N", "the most tokens to generate for each prompt")
    add("--temperature", 0.8, "T", "0: always the most likely token")
    add("--top-k", 0, "K", "sample from the K most likely tokens; 0: from all")
    add("--top-p", 1.0, "P", "sample from the fewest tokens with total probability P")
    bos = "whether to begin with the token that begins a document (default: as in the "
    bos += "tokenizer's configuration)"
    parser.add_argument("--bos", action=argparse.BooleanOptionalAction, help=bos)
    add("--seed", 0, "N", "seed of the sampling")
    add("--dtype", "float32", None, "computation dtype", choices=DTYPES)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    device = init_distributed()
    try:
        run(options, device)
    except UserError as error:
        refuse(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
