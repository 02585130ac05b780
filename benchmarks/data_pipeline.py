"""Measures the data path: `python -m benchmarks.data_pipeline [--large-megabytes 300]` writes
results/data_pipeline.json.

(a) Preparation (read, tokenize in processes, write, checksum) is compared with SentencePiece's own
    batch encoder on the same text and cores, which has all of the text in memory and writes
    nothing.
        aim: ratio >= 0.8
(b) The peak memory of preparing a large source is compared with that of a small one: the resident
    sets of this process and its workers, added up (shared pages count in each).
        aim: no growth with the source
(c) Batches from the loader are compared with a plain copy of the same windows from the memory map:
    the bytes written per second by each (the loader writes int64 inputs and targets, 16 bytes per
    token, the copy 2), and windows per second.
        aim: ratio of bytes >= 0.3

Runs alternate and medians are compared, so that other work on the machine affects both sides.
Preparation workers import this module again (spawn), so torch is imported only where it is needed.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import sentencepiece

from benchmarks.about import about
from data.prepare import prepare
from data.sampler import SampleOrder, count_windows
from data.sources import STDLIB, documents
from data.tokenizer import Tokenizer
from tools.command import CommandParser, run_command

RESULTS = Path(__file__).parent / "results" / "data_pipeline.json"
SEED = 1


def seconds_of(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cpu_seconds_of(work) -> float:
    """CPU seconds of this process, its threads and the children it waited for, which other work on
    the machine hardly affects."""
    before = os.times()
    work()
    return sum(os.times()[:4]) - sum(before[:4])


def write_source(path: Path, megabytes: float, texts: list[str]) -> None:
    """JSON lines of whole standard-library files, repeated until `megabytes` are reached."""
    written = 0
    with path.open("w") as file:
        while written < megabytes * 1e6:
            for text in texts:
                written += file.write(json.dumps({"text": text}) + "\n")
                if written >= megabytes * 1e6:
                    break


def preparation_speed(
    folder: Path, texts: list[str], tokenizer: Tokenizer, cores: int, megabytes: float, runs: int
) -> dict:
    source = folder / "speed.jsonl"
    write_source(source, megabytes, texts)
    in_memory = [document.text for document in documents(str(source))]
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    tokens = sum(map(len, processor.encode(in_memory, return_type="numpy", num_threads=cores)))
    ours, theirs, our_cpu, their_cpu = [], [], [], []

    def encode() -> None:
        theirs.append(
            seconds_of(lambda: processor.encode(in_memory, return_type="numpy", num_threads=cores))
        )

    def prepare_all() -> None:
        ours.append(
            seconds_of(
                lambda: prepare(
                    str(source), tokenizer, folder / "speed", workers=cores, overwrite=True
                )
            )
        )

    for _ in range(runs):
        their_cpu.append(cpu_seconds_of(encode))
        our_cpu.append(cpu_seconds_of(prepare_all))
    return {
        "text_megabytes": megabytes,
        "tokens": tokens,
        "workers": cores,
        "prepare_tokens_per_second": tokens / statistics.median(ours),
        "sentencepiece_tokens_per_second": tokens / statistics.median(theirs),
        "ratio": statistics.median(theirs) / statistics.median(ours),
        "ratio_of_cpu_seconds": statistics.median(their_cpu) / statistics.median(our_cpu),
        "ratio_of_each_run": [b / a for a, b in zip(ours, theirs, strict=True)],
    }


def peak_memory(command: list[str]) -> int:
    """The peak of the summed resident bytes of a process and its children, sampled every 20 ms."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        root, peak = psutil.Process(process.pid), 0
        while process.poll() is None:
            try:
                everyone = [root, *root.children(recursive=True)]
                peak = max(peak, sum(one.memory_info().rss for one in everyone))
            except psutil.NoSuchProcess:
                pass
            time.sleep(0.02)
    assert process.returncode == 0
    return peak


def preparation_memory(
    folder: Path, texts: list[str], tokenizer: Tokenizer, cores: int, large: float
) -> dict:
    model = folder / "t.model"
    model.write_bytes(tokenizer.model)
    peaks = {}
    for megabytes in (large / 10, large):
        source = folder / f"memory-{megabytes:g}.jsonl"
        write_source(source, megabytes, texts)
        command = [sys.executable, "-m", "tools.prepare", "--source", str(source), "--tokenizer",
                   str(model)]  # fmt: skip
        command += ["--out", str(folder / f"memory-{megabytes:g}"), "--workers", str(cores)]
        peaks[f"{megabytes:g}"] = peak_memory(command)
        source.unlink()
    small, big = peaks.values()
    return {
        "workers": cores,
        "peak_bytes_by_source_megabytes": peaks,
        "growth_bytes": big - small,
        "ratio": big / small,
    }


def batch_speed(folder: Path, seq_len: int, batch: int, runs: int, batches: int) -> dict:
    """Compares the loader with a copy: each delivers `batches` batches per run. The copy gets
    precomputed windows."""
    import torch

    from data.dataset import TokenDataset
    from data.loader import BatchLoader

    torch.set_num_threads(1)
    data = TokenDataset.open(folder, "train")
    windows = count_windows(data.num_tokens, seq_len)
    order = SampleOrder([windows], [1.0], seed=SEED, shuffle=True)
    starts = (
        (order.locate(np.arange(batch * batches))[2] * seq_len).reshape(batches, batch).tolist()
    )
    mapped = data.window(0, data.num_tokens)
    assert data.num_shards == 1  # so this is the memory map itself, not a copy

    def copy(dtype: type) -> None:
        for rows in starts:
            out = np.empty((batch, seq_len + 1), dtype)
            for row, start in enumerate(rows):
                out[row] = mapped[start : start + seq_len + 1]

    def load() -> None:
        loader = BatchLoader(
            data, seq_len=seq_len, global_batch_size=batch, seed=SEED, dp_rank=0, dp_size=1
        )
        for _ in range(batches):
            next(loader)
        loader.close()

    times = {"load": [], "copy": [], "copy_int64": []}
    for _ in range(runs):
        times["load"].append(seconds_of(load))
        times["copy"].append(seconds_of(lambda: copy(mapped.dtype.type)))
        times["copy_int64"].append(seconds_of(lambda: copy(np.int64)))
    median = {name: statistics.median(values) for name, values in times.items()}
    tokens = batches * batch * seq_len
    load_rate = tokens * 16 / median["load"]
    copy_rate = batches * batch * (seq_len + 1) * mapped.itemsize / median["copy"]
    return {
        "seq_len": seq_len,
        "batch": batch,
        "tokens_per_second": tokens / median["load"],
        "assembled_bytes_per_second": load_rate,
        "copied_bytes_per_second": copy_rate,
        "ratio_of_bytes": load_rate / copy_rate,
        "ratio_of_windows": median["copy"] / median["load"],
        "ratio_of_windows_to_int64_copy": median["copy_int64"] / median["load"],
    }


def main() -> int:
    parser = CommandParser(prog="python -m benchmarks.data_pipeline", description=__doc__)
    parser.add_argument(
        "--large-megabytes", type=float, default=300, help="size of the large source of (b)"
    )
    parser.add_argument("--speed-megabytes", type=float, default=60, help="size of the text in (a)")
    parser.add_argument("--runs", type=int, default=5, help="alternated runs of each measurement")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    cores = os.cpu_count()
    texts = [document.text for document in documents(STDLIB)]
    tokenizer = Tokenizer.train(texts, 4096)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = {
            **about("sentencepiece"),
            "load_average_at_start": os.getloadavg()[0],
            "preparation": preparation_speed(
                folder, texts, tokenizer, cores, options.speed_megabytes, options.runs
            ),
        }
        prepare(STDLIB, tokenizer, folder / "stdlib", workers=cores)
        result["batches"] = [
            batch_speed(folder / "stdlib", 128, 512, 4 * options.runs, 50),
            batch_speed(folder / "stdlib", 2048, 64, 4 * options.runs, 50),
        ]
        result["memory"] = preparation_memory(
            folder, texts, tokenizer, cores, options.large_megabytes
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    met = result["preparation"]["ratio"] >= 0.8 and all(
        b["ratio_of_bytes"] >= 0.3 for b in result["batches"]
    )
    print("all aims reached" if met else "an aim was NOT reached")
    return 0 if met else 1


if __name__ == "__main__":
    run_command(main)
