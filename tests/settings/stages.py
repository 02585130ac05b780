"""Helpers for tests of runs with stages: a reference for the samples, and runs that record what
they read and are killed where a stage ends."""

import json
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import train
from data.dataset import Mixture, TokenDataset
from data.sampler import MIXTURE_PERIOD, Permutation, mixture_pattern
from runtime.checkpoint.save import Saver
from runtime.start import init
from tests.planted import planted
from tests.runs import train_run, write_config
from training.step import TrainStep


@dataclass(frozen=True)
class Read:
    """A stage for the reference: its data, S, B and number of steps, and samples to leave out."""

    data: Mixture
    seq_len: int
    batch: int
    steps: int
    left_out: tuple[range, ...] = ()


def expected(stages: list[Read], seed: int) -> tuple[list[list[list[int]]], Counter[Any]]:
    """Every global batch of a run, [B][S + 1] each, as one process that never stops would read it:
    it counts, for each source and length of windows, how many of its samples have passed. Also how
    often each window (source, S, window) was read."""
    passed: dict[tuple[str, int], list[int]] = {}  # its number in the run, samples passed
    batches, windows = [], Counter[Any]()
    for stage in stages:
        source_of, _, _ = mixture_pattern(stage.data.weights)
        for source in stage.data.sources:
            passed.setdefault((source.checksum, stage.seq_len), [len(passed), 0])
        rows: list[list[int]] = []
        sample = 0
        while len(rows) < stage.batch * stage.steps:
            source = stage.data.sources[source_of[sample % MIXTURE_PERIOD]]
            entry = passed[source.checksum, stage.seq_len]
            number, nth = entry
            entry[1] += 1
            if not any(sample in left_out for left_out in stage.left_out):
                n = (source.num_tokens - 1) // stage.seq_len
                key = f"seed {seed} source {number} epoch {nth // n}"
                window = int(Permutation(n, key)(torch.tensor([nth % n]).numpy())[0])
                start = window * stage.seq_len
                rows.append(source.window(start, stage.seq_len + 1).tolist())
                windows[source.checksum, stage.seq_len, window] += 1
            sample += 1
        batches += [rows[i : i + stage.batch] for i in range(0, len(rows), stage.batch)]
    return batches, windows


def write_stages(folder: Path, data: Path, stages: list[dict], **sections: dict[str, Any]) -> str:
    """Like `write_config`, with a list of stages, a smaller model and larger micro-batches."""
    sections["model"] = {"num_layers": 2, **sections.get("model", {})}
    sections["train"] = {"micro_batch_size": 4, **sections.get("train", {})}
    path = write_config(folder, data, **sections)
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"data_stages: {json.dumps(stages)}\n")
    return path


def recorded(file: Path) -> AbstractContextManager[None]:
    """Append to `file`-RANK what each step reads: step, dp_rank, dp_size, rows of S + 1 tokens."""

    @planted(TrainStep, "__call__")
    def noted(call: Any, self: TrainStep, step: int, tokens: Any, targets: Any) -> Any:
        rows = torch.cat([tokens, targets[:, -1:]], 1).tolist()
        with open(f"{file}-{dist.get_rank()}", "a") as out:
            out.write(json.dumps([step, self.mesh.batch.rank, self.mesh.batch.size, rows]) + "\n")
        return call(self, step, tokens, targets)

    return noted()


def recorded_run(arguments: list[str], file: Path, kill: str = "", step: int = 0) -> str:
    """Train and record; kill this process where `kill` says, at the end of the stage that ends with
    `step`."""
    with recorded(file), killed(kill, step) if kill else nullcontext():
        return train_run(arguments)


@contextmanager
def killed(where: str, step: int) -> Iterator[None]:
    """Rank 0 dies at the boundary after `step`: `before the save`; `before the commit`; `after the
    save`; in `the changeover`, without process groups; or once the next stage has `begun`."""
    reached: list[int] = []
    targets: dict[str, tuple[Any, str]] = {
        "before the save": (Saver, "_copy"),
        "before the commit": (Saver, "_commit"),
        "after the save": (train, "join_again"),
        "the changeover": (init, "fresh_store"),
        "begun": (train, "build_listeners"),
    }

    @planted(Saver, "save")
    def saving(save: Any, self: Saver, at: int, *others: Any) -> None:
        reached.append(at)
        save(self, at, *others)

    @planted(*targets[where])
    def dies(run: Any, *arguments: Any, **named: Any) -> Any:
        rank = dist.get_rank() if dist.is_initialized() else arguments[1]
        if rank == 0 and reached[-1:] == [step]:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(*arguments, **named)

    with saving(), dies():
        yield


def check_reads(file: Path, batches: list[list[list[int]]]) -> None:
    """Every recorded part of a batch is the expected one, and every batch was read whole."""
    found = defaultdict[tuple[int, int], set[int]](set)  # step, dp size → dp ranks
    for path in file.parent.glob(f"{file.name}-*"):
        for line in path.read_text().splitlines():
            step, dp_rank, dp_size, rows = json.loads(line)
            share = len(batches[step]) // dp_size
            assert rows == batches[step][dp_rank * share : (dp_rank + 1) * share], step
            found[step, dp_size].add(dp_rank)
    whole = {step for (step, dp_size), ranks in found.items() if len(ranks) == dp_size}
    assert whole == set(range(len(batches)))


def mixture(*paths: Path, weights: tuple[float, ...] = (1.0,)) -> Mixture:
    return Mixture([TokenDataset.open(path, "train") for path in paths], weights)
