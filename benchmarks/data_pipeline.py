"""Measures the data path: `python -m benchmarks.data_pipeline`

(a) Preparation (read, tokenize in processes, write, checksum) is compared with SentencePiece's own
    batch encoder on the same text and cores, which has all of the text in memory and writes
    nothing.
        aim: ratio >= 0.8
(b) The peak memory of preparing a large source is compared with that of one a tenth as large.
        aim: at most a fifth more
(c) Batches from the loader are compared with a plain copy of the same windows from the memory map:
    the bytes written per second by each (the loader writes int64 inputs and targets, 16 bytes per
    token, the copy 2).
        aim: ratio of bytes >= 0.3

Preparation workers import this module again (spawn), so torch is imported only where it is needed.
"""

import itertools
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import sentencepiece

from benchmarks.compare import alternate, parser, ratio, run_watched, timed, write
from data.prepare import prepare
from data.sampler import SampleOrder, count_windows
from data.sources import STDLIB, documents
from data.tokenizer import Tokenizer
from tools.command import run_command

SEED, BATCHES = 1, 50
CORES = os.cpu_count() or 1
RATIO_AIM, GROWTH_AIM, BYTES_AIM = 0.8, 0.2, 0.3


def write_source(path: Path, megabytes: float, texts: list[str]) -> None:
    """JSON lines of whole standard-library files, repeated until `megabytes` are reached."""
    written, again = 0, itertools.cycle(texts)
    with path.open("w") as file:
        while written < megabytes * 1e6:
            written += file.write(json.dumps({"text": next(again)}) + "\n")


def preparation_speed(
    folder: Path, texts: list[str], tokenizer: Tokenizer, megabytes: float, rounds: int
) -> dict[str, Any]:
    source = folder / "speed.jsonl"
    write_source(source, megabytes, texts)
    in_memory = [document.text for document in documents(str(source))]
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    encode = partial(processor.encode, in_memory, return_type="numpy", num_threads=CORES)
    tokens = sum(map(len, encode()))
    out = folder / "speed"
    ours = partial(prepare, str(source), tokenizer, out, workers=CORES, overwrite=True)
    times = alternate({"theirs": lambda: timed(encode), "ours": lambda: timed(ours)}, rounds)
    seconds = {name: [each.seconds for each in found] for name, found in times.items()}
    cpu = {name: [each.cpu_seconds for each in found] for name, found in times.items()}
    return {
        "text_megabytes": megabytes,
        "workers": CORES,
        "prepare_tokens_per_second": tokens / median(seconds["ours"]),
        "ratio": ratio(seconds["theirs"], seconds["ours"]),
        "ratio_of_cpu_seconds": ratio(cpu["theirs"], cpu["ours"]),
    }


def preparation_memory(
    folder: Path, texts: list[str], tokenizer: Tokenizer, large: float
) -> dict[str, Any]:
    model = folder / "t.model"
    model.write_bytes(tokenizer.model)
    peaks = {}
    for megabytes in (large / 10, large):
        source = folder / f"memory-{megabytes:g}.jsonl"
        write_source(source, megabytes, texts)
        command = [sys.executable, "-m", "tools.prepare", "--source", source, "--tokenizer", model]
        command += ["--out", folder / f"memory-{megabytes:g}", "--workers", CORES]
        _, peaks[f"{megabytes:g}"] = run_watched([str(word) for word in command])
        source.unlink()
    small, big = peaks.values()
    return {"workers": CORES, "peak_bytes_by_megabytes": peaks, "growth_bytes": big - small}


def batch_speed(folder: Path, seq_len: int, batch: int, rounds: int) -> dict[str, Any]:
    """Compares the loader with a copy, which gets precomputed windows."""
    import torch

    from data.dataset import Mixture, TokenDataset
    from data.loader import BatchLoader

    torch.set_num_threads(1)
    data = TokenDataset.open(folder, "train")
    mixture = Mixture([data], [1.0])
    windows = count_windows(data.num_tokens, seq_len)
    order = SampleOrder([windows], [1.0], seed=SEED, shuffle=True)
    numbers = np.arange(batch * BATCHES)
    starts = (order.locate(numbers)[2] * seq_len).reshape(BATCHES, batch).tolist()
    mapped = data.window(0, data.num_tokens)
    assert len(data._shards) == 1  # so this is the memory map itself, not a copy

    def copy() -> None:
        for rows in starts:
            out = np.empty((batch, seq_len + 1), mapped.dtype)
            for row, start in enumerate(rows):
                out[row] = mapped[start : start + seq_len + 1]

    def load() -> None:
        loader = BatchLoader(
            mixture, seq_len=seq_len, global_batch_size=batch, seed=SEED, dp_rank=0, dp_size=1
        )
        for _ in range(BATCHES):
            next(loader)
        loader.close()

    programs = {work.__name__: partial(timed, work) for work in (load, copy)}
    times = {
        name: [each.seconds for each in found]
        for name, found in alternate(programs, rounds).items()
    }
    bytes_ratio = 16 * seq_len / (mapped.itemsize * (seq_len + 1))  # of a window
    of_windows = ratio(times["copy"], times["load"])
    return {
        "seq_len": seq_len,
        "batch": batch,
        "tokens_per_second": BATCHES * batch * seq_len / median(times["load"]),
        "ratio_of_bytes": {name: bytes_ratio * each for name, each in of_windows.items()},
    }


def main() -> int:
    options = parser("data_pipeline", __doc__, rounds=5)
    options.add_argument("--large-megabytes", type=float, default=300, help="the source of (b)")
    options.add_argument("--speed-megabytes", type=float, default=60, help="the text of (a)")
    chosen = options.parse_args()
    texts = [document.text for document in documents(STDLIB)]
    tokenizer = Tokenizer.train(texts, 4096)
    with tempfile.TemporaryDirectory() as name:
        folder, megabytes = Path(name), chosen.speed_megabytes
        speed = preparation_speed(folder, texts, tokenizer, megabytes, chosen.rounds)
        prepare(STDLIB, tokenizer, folder / "stdlib", workers=CORES)
        sizes = ((128, 512), (2048, 64))
        batches = [batch_speed(folder / "stdlib", *size, 4 * chosen.rounds) for size in sizes]
        memory = preparation_memory(folder, texts, tokenizer, chosen.large_megabytes)
    results = {"preparation": speed, "batches": batches, "memory": memory}
    write(chosen.json, results, "sentencepiece")
    met = speed["ratio"]["median"] >= RATIO_AIM
    met &= all(each["ratio_of_bytes"]["median"] >= BYTES_AIM for each in batches)
    small = min(memory["peak_bytes_by_megabytes"].values())
    met &= memory["growth_bytes"] <= GROWTH_AIM * small
    print("all aims reached" if met else "an aim was NOT reached")
    return 0 if met else 1


if __name__ == "__main__":
    run_command(main)
