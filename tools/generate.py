"""Continue text with a trained model: `python -m tools.generate --checkpoint DIR --prompt TEXT [--max-new-tokens N] …`

DIR is a checkpoint, a run folder (its newest checkpoint) or an exported folder in Hugging Face's format. The text of a single
prompt appears as it is written; several (`--prompt` again, or `--prompts FILE`) are computed together, and printed when they
are done. On several processes the model is cut over all of them, whatever layout trained it:

    torchrun --nproc-per-node 2 -m tools.generate --checkpoint DIR --prompt TEXT

Keys and values of earlier tokens are kept (model/cache.py): each new token costs one token's work.
"""

import argparse
import io
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from errors import UserError
from model.cache import KeyValueCache
from model.transformer import Transformer
from tools.continuation import Continuation
from tools.load_model import Loaded, load_model
from tools.sampling import Sampling, draw_over_tp, row_numbers
from training.build import DTYPES
from training.join import start_distributed
from training.voice import from_rank_0, refuse, together


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: list[list[int]],
    count: int,
    sampling: Sampling,
    stop: Collection[int] = (),
    first_row: int = 0,
) -> Iterator[list[int | None]]:
    """Each row's next token, up to `count` times; None once a row has met a token of `stop`. Ends when all rows have.

    Every tp rank calls it alike, and goes through it as far as the others do.

    Args:
        prompts: tokens of each row, at least one; the lengths may differ.
        stop: tokens that end a text, and do not belong to it.
        first_row: rows are numbered from here; a row's number and `sampling.seed` decide its draws.
    """
    embedding, head = model.embedding, model.head
    assert embedding is not None, "the whole model in one stage"
    assert head is not None
    device, dtype = embedding.weight.device, embedding.weight.dtype
    lengths = [len(prompt) for prompt in prompts]
    cache = KeyValueCache(model.config, head.group.size(), lengths, count, dtype, device)
    rows = range(first_row, first_row + len(prompts))
    numbers = row_numbers(sampling.seed, rows, count).to(device)

    padded = [[0] * (max(lengths) - len(prompt)) + prompt for prompt in prompts]  # any token will do: nobody sees it
    tokens = torch.tensor(padded, device=device).T  # [S, B], then [1, B]
    running = [True] * len(prompts)
    for step in range(count):
        logits = model.next_logits(tokens, cache)[0]  # [B, V/tp]
        drawn = draw_over_tp(logits, head.vocab_size, sampling, numbers[step], head.group)  # [B]
        new = drawn.tolist()
        running = [runs and token not in stop for runs, token in zip(running, new, strict=True)]
        if not any(running):
            return
        yield [token if runs else None for runs, token in zip(running, new, strict=True)]
        tokens = drawn.unsqueeze(0)


def continue_texts(
    loaded: Loaded, prompts: list[list[int]], count: int, sampling: Sampling, first_row: int = 0
) -> Iterator[tuple[int, str]]:
    """Pieces of text, each with the number of the prompt that it continues, as they become certain."""
    texts = [Continuation(loaded.tokenizer, prompt) for prompt in prompts]
    for new in generate(loaded.model, prompts, count, sampling, loaded.stop, first_row):
        for row, token in enumerate(new):
            if token is not None:
                yield row, texts[row].add(token)
    for row, text in enumerate(texts):
        yield row, text.end()


def read_options(options: argparse.Namespace) -> tuple[list[str], Sampling]:
    """The prompts, and how to draw. Raises UserError where an option makes no sense."""
    if options.max_new_tokens < 0:
        raise UserError("--max-new-tokens", options.max_new_tokens, "is no number of tokens", "give 0 or more")
    if options.batch_size < 1:
        raise UserError("--batch-size", options.batch_size, "is no number of prompts", "give 1 or more")
    prompts = list(options.prompt)
    if options.prompts is not None:
        try:
            prompts += [line for line in options.prompts.read_text(encoding="utf-8").split("\n") if line]
        except (OSError, UnicodeDecodeError) as error:
            why = f"cannot be read: {error}"
            raise UserError("--prompts", str(options.prompts), why, "give a UTF-8 file with one prompt a line") from None
    if not prompts:
        raise UserError("--prompt", None, "there is nothing to continue", "give --prompt TEXT, or --prompts FILE")
    return prompts, Sampling(options.temperature, options.top_k, options.top_p, options.seed)


def run(options: argparse.Namespace, device: str) -> None:
    """On every rank; rank 0 writes to standard output. Raises UserError on all of them alike."""
    prompts, sampling = from_rank_0(lambda: read_options(options), device)
    loaded = load_model(options.checkpoint, DTYPES[options.dtype], device)
    encoded = together(lambda: [loaded.encode(prompt) for prompt in prompts], device)

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            sys.stdout.write(text)
            sys.stdout.flush()

    if len(prompts) == 1:
        say(prompts[0])
        for _, piece in continue_texts(loaded, encoded, options.max_new_tokens, sampling):
            say(piece)
        say("\n")
        return
    for first in range(0, len(prompts), options.batch_size):
        batch = slice(first, first + options.batch_size)
        texts = prompts[batch]
        for row, piece in continue_texts(loaded, encoded[batch], options.max_new_tokens, sampling, first):
            texts[row] += piece
        say("".join(f"--- {number}\n{text}\n" for number, text in enumerate(texts, first + 1)))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint, run or exported folder")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="the text to continue; may be repeated")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="more of them, one a line")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="prompts computed at a time (default 16)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="for each prompt (default 128)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: the most likely token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K most likely tokens (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="from the fewest of probability P (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="to compute in (default float32)")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no UTF-8 shows what it can
    device = start_distributed()
    try:
        run(options, device)
    except UserError as error:
        refuse(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
