"""How evenly context parallelism divides the work of attention: `python -m
benchmarks.context_balance`

The work of a token is the number of keys that it sees: all tokens of its document up to itself. Two
ways to split a sequence are compared:

- contiguous: rank r has the r-th of cp equal parts;
- zig-zag: what training does (`ContextParallel.chunks` in parallel/context.py).

The figure is the work of the rank with the most, over the mean of all ranks: 1.00 is perfect
balance, and 2.00 means that the others wait half of the time. Documents have lognormal lengths, end
to end, and the stream is cut into sequences; the figure is the mean over sequences. Nothing is
timed: this counts keys, and a kernel's own overhead is left out.
"""

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from parallel.context import ContextParallel
from parallel.placement import chunk_range
from tools.command import CommandParser, run_command

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/context_balance.json"
LENGTH = 131_072  # tokens of a sequence
SEQUENCES, SEED = 100, 0
SIGMA = 1.2  # of the logarithm of a document's length
MEANS = (None, 16_384, 4_096)  # tokens of a document; None: each sequence is one
SIZES = (2, 4, 8, 16)  # cp

Split = Callable[[int, int, int], list[range]]  # (cp, rank, length) → positions of the rank


def contiguous(cp: int, rank: int, length: int) -> list[range]:
    return [chunk_range(length, cp, rank)]


def zigzag(cp: int, rank: int, length: int) -> list[range]:
    return ContextParallel(cp, rank).chunks(length)


SPLITS: dict[str, Split] = {"contiguous": contiguous, "zig-zag": zigzag}


def document_lengths(mean: int, seed: int = SEED) -> Iterator[int]:
    """Endless lengths of documents, at least 1, lognormal with this mean and SIGMA."""
    numbers = random.Random(seed)
    mu = math.log(mean) - SIGMA**2 / 2
    while True:
        yield max(1, round(numbers.lognormvariate(mu, SIGMA)))


def keys_seen(mean: int | None, length: int, sequences: int) -> Tensor:
    """[sequences, length] int64: the keys that each token sees. The end of a document that began in
    the sequence before counts as a document, as in training (model/documents.py)."""
    index = torch.arange(length).expand(sequences, length)
    if mean is None:
        return index + 1
    begins = torch.zeros(sequences * length, dtype=torch.bool)
    at = 0
    for size in document_lengths(mean):
        begins[at] = True
        at += size
        if at >= len(begins):
            break
    begins = begins.view(sequences, length)
    begins[:, 0] = True
    return index - torch.where(begins, index, 0).cummax(dim=1).values + 1


def imbalance(seen: Tensor, split: Split, cp: int) -> float:
    """The most that a rank computes, over the mean of cp ranks; the mean over sequences."""
    length = seen.shape[1]
    work = torch.stack(
        [
            sum((seen[:, part.start : part.stop].sum(1) for part in split(cp, rank, length)),
                start=torch.zeros(len(seen), dtype=torch.int64))
            for rank in range(cp)
        ]
    ).double()  # fmt: skip
    return (work.amax(0) / work.mean(0)).mean().item()


def measure(sequences: int = SEQUENCES) -> list[dict]:
    """One row for each mean length of documents, with the imbalance of each split by cp."""
    rows = []
    for mean in MEANS:
        # sequences that are one document are all the same
        seen = keys_seen(mean, LENGTH, 1 if mean is None else sequences)
        of_splits = {
            name: {str(cp): imbalance(seen, split, cp) for cp in SIZES}
            for name, split in SPLITS.items()
        }
        rows.append({"mean_document": mean, **of_splits})
    return rows


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = measure()
    print(f"{'documents':14}" + "".join(f"{f'cp {cp}':>13}" for cp in SIZES))
    for row in rows:
        mean = row["mean_document"]
        name = "one" if mean is None else f"of {mean:,}"
        pairs = [" / ".join(f"{row[split][str(cp)]:.2f}" for split in SPLITS) for cp in SIZES]
        print(f"{name:14}" + "".join(f"{pair:>13}" for pair in pairs))
    found = {"seq_len": LENGTH, "sequences": SEQUENCES, "sigma": SIGMA, "seed": SEED, "rows": rows}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
