"""Compares a mixture of experts with a dense model: `python -m benchmarks.experts`

configs/laptop_moe.yaml and configs/laptop.yaml compute each token with equally many weights, on the
same tokens; the router is the only addition.

CPU seconds per token: both train in one process with one thread, in float32, and take turns, step
by step.

With --loss, which takes minutes: the loss on held-out text after the last step, in nats per token,
for several seeds, from which initial weights and the order of the data are drawn. Each run is one
process with one thread, as many at a time as there are cores. Another layout rounds otherwise; with
experts that changes a few choices, after which the runs diverge, so the loss of a seed can differ
by some hundredths, much more than a dense model's.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.compare import ROOT, parser, write
from costs.parameters import num_active_parameters, num_parameters
from model.experts import Experts
from proofs.parity.run import make_step
from runtime.log.log_lines import read_records
from runtime.start.init import init_distributed
from settings.checks import validate
from settings.config import Config
from settings.load import load_config
from tools.command import run_command
from training.step import TrainStep

CONFIGS = {"dense": "configs/laptop.yaml", "experts": "configs/laptop_moe.yaml"}
ALONE = ["parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1"]
ONE_PROCESS = {"dense": ALONE, "experts": [*ALONE, "parallel.ep=1"]}
SEEDS = (0, 1, 2)


# --- both runs do the same work ---


def read(name: str, *overrides: str) -> Config:
    return load_config(str(ROOT / CONFIGS[name]), list(overrides))


def same_work(dense: Config, experts: Config) -> bool:
    """Whether both compute each token with equally many weights, besides those of the router, and
    train on the same tokens."""
    model = experts.model
    routers = len(model.layers_with_experts) * model.of(Experts).count * model.dim
    same = all(getattr(dense, of) == getattr(experts, of) for of in ("train", "optimizer", "data"))
    return same and num_active_parameters(model) - routers == num_active_parameters(dense.model)


# --- CPU seconds ---


def ours(name: str, *overrides: str) -> TrainStep:
    config = read(name, *ONE_PROCESS[name], *overrides)
    validate(config, 1)
    return make_step(config)


def random_batches(config: Config, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocab_size, train = config.model.vocab_size, config.train
    shape = train.global_batch_size, train.seq_len + 1
    return [torch.randint(vocab_size, shape, generator=generator) for _ in range(count)]


def measure(rounds: int) -> dict[str, Any]:
    """CPU seconds, and their ratio within a round. Every second round goes backwards, so that
    neither always runs just after the other."""
    trains = {name: ours(name) for name in CONFIGS}
    config = trains["dense"].config
    tokens = config.train.global_batch_size * config.train.seq_len
    times: dict[str, list[float]] = {name: [] for name in trains}
    for number, rows in enumerate(random_batches(config, rounds + 1)):
        for name in list(trains)[:: -1 if number % 2 else 1]:
            began = process_time()
            trains[name](number, rows[:, :-1], rows[:, 1:])
            times[name].append((process_time() - began) / tokens)
    times = {name: found[1:] for name, found in times.items()}  # the first warmed up
    ratios = [one / other for one, other in zip(times["experts"], times["dense"], strict=True)]
    return {
        "rounds": rounds,
        "cpu_seconds_per_token": {name: statistics.median(found) for name, found in times.items()},
        "experts_over_dense": {
            "median": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
        },
    }


# --- held-out loss ---


def train_alone(name: str, run: Path, *overrides: str) -> list[dict[str, Any]]:
    """Trains in one process with one thread; returns what the run has logged."""
    command = [sys.executable, "train.py", CONFIGS[name], *ONE_PROCESS[name], *overrides]
    command += ["checkpoint.interval=never", f"run.dir={run}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    return read_records(run)


def heldout_loss(name: str, seed: int, folder: Path) -> float:
    """Trains; returns the loss after the last step."""
    steps = read(name).train.steps
    given = f"train.seed={seed}", f"train.eval_interval={steps}"
    last = train_alone(name, folder / f"{name}_{seed}", *given)[-1]
    assert last["step"] == steps
    return last["eval_loss"]


def measure_loss() -> dict[str, Any]:
    assert same_work(read("dense"), read("experts"))
    found = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        of = partial(heldout_loss, folder=Path(folder))
        running = {name: pool.map(partial(of, name), SEEDS) for name in CONFIGS}
        for name, runs in running.items():
            model, losses = read(name).model, [*runs]
            found[name] = {
                "parameters": num_parameters(model),
                "active_parameters": num_active_parameters(model),
                "losses": losses,
                "mean": statistics.mean(losses),
            }
    return found


def main() -> None:
    options = parser("experts", __doc__)
    options.add_argument("--loss", action="store_true", help="compare held-out losses, too")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    init_distributed(store=dist.HashStore())
    results = measure(chosen.rounds)
    dist.destroy_process_group()
    if chosen.loss:
        results["heldout_loss"] = measure_loss()
    write(chosen.json, results)


if __name__ == "__main__":
    run_command(main)
