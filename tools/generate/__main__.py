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
from runtime.messages import from_rank_0, on_all_ranks, refuse
from runtime.start.init_distributed import init_distributed
from tools.command import CommandParser, run_command
from tools.generate.load_model import load_model
from tools.generate.loop import continue_texts
from tools.generate.sampling import Sampling
from training.precision import DTYPES


def read_options(options: argparse.Namespace) -> tuple[list[str], Sampling]:
    """The prompts, and how to sample. Raises UserError for an invalid option."""
    if options.max_new_tokens < 0:
        why = "a number of tokens cannot be negative"
        raise UserError("--max-new-tokens", options.max_new_tokens, why, "give 0 or more")
    if options.batch_size < 1:
        why = "a batch needs at least one prompt"
        raise UserError("--batch-size", options.batch_size, why, "give 1 or more")
    prompts = list(options.prompt)
    if options.prompts is not None:
        try:
            prompts += [
                line for line in options.prompts.read_text(encoding="utf-8").split("\n") if line
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
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="a checkpoint, run folder or exported folder",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="the text to continue; may be repeated",
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="more prompts, one per line")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=16,
        metavar="N",
        help="prompts computed together (default 16)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="the most tokens to generate for each prompt (default 128)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0: always the most likely token (default 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens (default: all)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the fewest tokens with total probability P (default 1)",
    )
    parser.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="whether to begin with the token that begins a document (default: "
        "as in the tokenizer's configuration)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="computation dtype (default float32)"
    )
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
