"""Continues text with a trained model: `python -m tools.generate --checkpoint DIR --prompt TEXT
[--max-new-tokens N] …`

DIR is a checkpoint, a run folder (its newest checkpoint is used) or an exported folder in Hugging
Face format. Text is printed as it is generated; several prompts are continued one after the other.
With several processes, the model is sharded over all of them by tensor parallelism, whatever layout
trained it:

    torchrun --nproc-per-node 2 -m tools.generate --checkpoint DIR --prompt TEXT

Keys and values of earlier tokens are cached (cache.py), so each new token costs the computation of
one token. A checkpoint's checksums are verified first, as by tools.verify, and a damaged one is
refused.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from runtime.agreement import on_all_ranks
from settings.config import DTYPES
from tools.command import CommandParser, at_least, run_command
from tools.generate.load_model import load_model, on_ranks
from tools.generate.loop import Sampling, continue_text


def run(options: argparse.Namespace, device: str) -> None:
    """Generates the text. Runs on every rank; rank 0 writes to standard output. Raises the same
    UserError on all ranks."""

    def read() -> Sampling:
        at_least(0, max_new_tokens=options.max_new_tokens)
        return Sampling(options.temperature, options.top_k, options.seed)

    def write(text: str) -> None:
        if dist.get_rank() == 0:
            sys.stdout.write(text)
            sys.stdout.flush()

    sampling, prompts = on_all_ranks(read), options.prompt
    loaded = load_model(options.checkpoint, DTYPES[options.dtype], device)
    encoded = on_all_ranks(lambda: [loaded.encode(prompt) for prompt in prompts])
    for number, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True)):
        write(f"--- {number + 1}\n{prompt}" if len(prompts) > 1 else prompt)
        own = replace(sampling, seed=sampling.seed + number)
        for piece in continue_text(loaded, tokens, options.max_new_tokens, own):
            write(piece)
        write("\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m tools.generate", description=__doc__)
    add = parser.option
    parser.required("--checkpoint", Path, "DIR", "a checkpoint, run folder or exported folder")
    prompt = "the text to continue; may be repeated"
    parser.required("--prompt", str, "TEXT", prompt, action="append")
    add("--max-new-tokens", 128, "N", "the most tokens to generate for each prompt")
    add("--temperature", 0.8, "T", "0: always the most likely token")
    add("--top-k", 0, "K", "sample from the K most likely tokens; 0: from all")
    add("--seed", 0, "N", "seed of the first prompt; each further prompt has the next")
    add("--dtype", "float32", None, "computation dtype", choices=DTYPES)
    return parser.parse_args(arguments)


def main() -> None:
    on_ranks(partial(run, parse()))


if __name__ == "__main__":
    run_command(main)
