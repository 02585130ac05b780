"""Compares Muon with AdamW: `python -m benchmarks.optimizers`, after `make data`

Both train configs/laptop.yaml and configs/laptop_moe.yaml for 100 steps of small batches, each run
in one process with one thread, as many at a time as there are cores. The learning rate of both
is the best of the same grid on one seed; with it, three seeds are trained.

- steps: until the held-out loss (nats per token) is at most the worst of AdamW's three last ones;
  null: never.
- update: its share of the CPU seconds of a step.

What this does not show: what a larger model, a longer run or a larger batch gains; decay, betas and
momentum that are tuned too; a layout in which matrices travel; a GPU.
"""

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.compare import parser, write
from benchmarks.experts import CONFIGS, SEEDS, ours, random_batches, train_alone
from runtime.start.init import init_distributed
from tools.command import run_command

OPTIMIZERS = ("adamw", "muon")
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
SHORT = ["train.global_batch_size=16", "train.micro_batch_size=16", "optimizer.warmup_steps=10"]
EVERY = 5  # steps between two evaluations

Losses = dict[int, float]  # by step


def heldout_losses(
    folder: Path, steps: int, name: str, optimizer: str, rate: float, seed: int
) -> Losses:
    overrides = [f"optimizer.name={optimizer}", f"optimizer.lr={rate}", f"train.seed={seed}"]
    overrides += [f"train.steps={steps}", f"train.eval_interval={min(EVERY, steps)}", *SHORT]
    overrides += [f"run.log_interval={min(EVERY, steps)}", "train.eval_samples=64"]
    records = train_alone(name, folder / f"{name}_{optimizer}_{rate}_{seed}", *overrides)
    return {each["step"]: each["eval_loss"] for each in records if "eval_loss" in each}


def last(losses: Losses) -> float:
    return losses[max(losses)]


def steps_to(losses: Losses, loss: float) -> int | None:
    return min((step for step, found in losses.items() if found <= loss), default=None)


def compare(
    name: str, train: Callable[..., Losses], rates: Sequence[float], pool: ThreadPoolExecutor
) -> dict[str, Any]:
    """Both optimizers on one configuration."""
    tried = {
        optimizer: {rate: pool.submit(train, name, optimizer, rate, SEEDS[0]) for rate in rates}
        for optimizer in OPTIMIZERS
    }
    grids = {
        optimizer: {rate: last(run.result()) for rate, run in runs.items()}
        for optimizer, runs in tried.items()
    }
    best = {optimizer: min(grid, key=lambda rate: grid[rate]) for optimizer, grid in grids.items()}
    runs = {
        optimizer: [
            tried[optimizer][best[optimizer]],
            *(pool.submit(train, name, optimizer, best[optimizer], seed) for seed in SEEDS[1:]),
        ]
        for optimizer in OPTIMIZERS
    }
    losses = {optimizer: [run.result() for run in each] for optimizer, each in runs.items()}
    target = max(map(last, losses["adamw"]))
    return {
        optimizer: {
            "grid": {str(rate): loss for rate, loss in grids[optimizer].items()},
            "learning_rate": best[optimizer],
            "last_losses": [*map(last, found)],
            "mean": statistics.mean(map(last, found)),
            "steps": [steps_to(each, target) for each in found],
        }
        for optimizer, found in losses.items()
    }


def update_share(name: str, optimizer: str, rounds: int) -> float:
    """The update's share of the CPU seconds of a step."""
    train, shares = ours(name, f"optimizer.name={optimizer}", *SHORT), []
    for rows in random_batches(train.config, rounds + 1):
        began = process_time()
        _, norm = train.forward_backward(rows[:, :-1], rows[:, 1:])
        before_update = process_time()
        train.optimizer.step(1e-3, norm, 1.0)
        ended = process_time()
        shares.append((ended - before_update) / (ended - began))
    return statistics.median(shares[1:])  # the first warmed up


def main() -> None:
    options = parser("optimizers", __doc__)
    options.option("--steps", 100, "N", "of a run")
    options.option("--rates", len(RATES), "N", "how many learning rates are tried")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        train = partial(heldout_losses, Path(folder), chosen.steps)
        found = {name: compare(name, train, RATES[: chosen.rates], pool) for name in CONFIGS}
    init_distributed(store=dist.HashStore())
    update = {
        name: {each: update_share(name, each, chosen.rounds) for each in OPTIMIZERS}
        for name in CONFIGS
    }
    dist.destroy_process_group()
    write(chosen.json, {"steps": chosen.steps, "heldout": found, "update": update})


if __name__ == "__main__":
    run_command(main)
