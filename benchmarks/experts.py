"""Compares a mixture of experts with a dense model and with Hugging Face's Mixtral: `python -m
benchmarks.experts`

configs/laptop_moe.yaml and configs/laptop.yaml compute each token with equally many weights, on the
same tokens; the router is the only addition.

CPU seconds per token. Programs train in one process with one thread, in float32, and take turns,
step by step:

- experts and dense: the two configurations;
- experts as Mixtral: the first with Mixtral's router, which has neither bias, scale nor loss;
- Mixtral: `transformers`' MixtralForCausalLM with the same weights (eager PyTorch, SDPA, fused
  AdamW, the same micro-batches), once with its loop over experts and once with torch's grouped_mm,
  its default. Its first loss must be that of "experts as Mixtral".

The first two are also compared as `make train` runs them, in eight processes, in turns of a few
steps.

With --loss, which takes minutes: the loss on held-out text after the last step, in nats per token,
for several seeds, from which initial weights and the order of the data are drawn. Each run is one
process with one thread, as many at a time as there are cores. Another layout rounds otherwise; with
experts that changes a few choices, after which the runs diverge, so the loss of a seed can differ
by some hundredths, much more than a dense model's.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.compare import ROOT, alternate, cpu_seconds_of, parser, ratio, write
from benchmarks.train_cpu import ALONE, build, our_step, plain_step, random_batches, start
from costs.parameters import num_active_parameters, num_parameters
from model.experts import Experts
from runtime.log.log_lines import read_records
from runtime.start.init import init_distributed
from settings.config import Config
from settings.load import load_config
from tools.command import run_command
from tools.huggingface.config import CONFIG, config_json, parameters
from training.step import TrainStep

CONFIGS = {"dense": "configs/laptop.yaml", "experts": "configs/laptop_moe.yaml"}
ONE_PROCESS = {"dense": ALONE, "experts": [*ALONE, "parallel.ep=1"]}
AS_MIXTRAL = [
    "model.router=softmax_renormalised",
    "model.experts.router_scale=1.0",
    "model.sigmoid_bias=null",
    "model.experts.router_aux_weight=0.0",
]
# how Mixtral computes its experts → the name of that in transformers
MIXTRAL = {"Mixtral, loop": "eager", "Mixtral, grouped_mm": "grouped_mm"}
# result → the programs whose times are divided
RATIOS = {
    "experts_over_dense": ("experts", "dense"),
    "as_mixtral_over_mixtral_loop": ("experts as Mixtral", "Mixtral, loop"),
    "as_mixtral_over_mixtral_grouped_mm": ("experts as Mixtral", "Mixtral, grouped_mm"),
}
STEPS = 6  # of a turn in eight processes
SAME = 1e-5  # relative difference of two losses in float32
SEEDS = (0, 1, 2)

Step = Callable[[int, Tensor], float]  # (number of the step, rows [B, S + 1]) → loss


# --- both runs do the same work ---


def read(name: str, *overrides: str) -> Config:
    return load_config(str(ROOT / CONFIGS[name]), list(overrides))


def same_work(dense: Config, experts: Config) -> bool:
    """Whether both compute each token with equally many weights, besides those of the router, and
    train on the same tokens."""
    model = experts.model
    routers = len(model.layers_with_experts) * model.of(Experts).count * model.dim
    same = (dense.train, dense.optimizer, dense.data) == (
        experts.train,
        experts.optimizer,
        experts.data,
    )
    return same and num_active_parameters(model) - routers == num_active_parameters(dense.model)


# --- CPU seconds ---


def ours(name: str, *overrides: str) -> TrainStep:
    return build(read(name, *ONE_PROCESS[name], *overrides))


def mixtral(train: TrainStep, implementation: str) -> Any:
    """transformers' model with the weights of `train`."""
    from transformers import AutoModelForCausalLM

    weights = {each.name: each.sharded.to_local() for each in train.weights}
    config, tensors = train.config, {}
    for each in parameters(config.model):
        weight = weights[each.ours]
        tensors[each.theirs] = (weight if each.expert is None else weight[each.expert]).clone()
    content = config_json(config.model, dtype="float32", max_length=config.train.seq_len)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(content))
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="sdpa",
            experts_implementation=implementation,
        )


def programs(*overrides: str) -> tuple[Config, dict[str, Step]]:
    """All programs. Those that must compute the same begin with the same weights."""
    train = ours("experts", *overrides, *AS_MIXTRAL)
    return train.config, {
        "dense": our_step(ours("dense", *overrides)),
        "experts": our_step(ours("experts", *overrides)),
        "experts as Mixtral": our_step(train),
        **{name: plain_step(train.config, mixtral(train, how)) for name, how in MIXTRAL.items()},
    }


def first_losses(steps: dict[str, Step], rows: Tensor) -> dict[str, float]:
    """The loss of each program at its first step. Mixtral's must be ours."""
    losses = {name: step(0, rows) for name, step in steps.items()}
    for name in MIXTRAL:
        assert abs(losses[name] / losses["experts as Mixtral"] - 1) < SAME, losses
    return losses


def measure(rounds: int) -> dict[str, Any]:
    config, steps = programs()
    first, *batches = random_batches(config, rounds + 2)
    first_losses(steps, first)

    def turns(step: Step) -> Callable[[], float]:
        numbered = iter(enumerate(batches, 1))
        return lambda: cpu_seconds_of(lambda: step(*next(numbered)))

    times = alternate({name: turns(step) for name, step in steps.items()}, rounds + 1)
    times = {name: found[1:] for name, found in times.items()}  # the first warmed up
    tokens = config.train.global_batch_size * config.train.seq_len
    return {
        "rounds": rounds,
        "cpu_seconds_per_token": {
            name: statistics.median(found) / tokens for name, found in times.items()
        },
        "ratios": {key: ratio(times[one], times[other]) for key, (one, other) in RATIOS.items()},
    }


def measure_3d(rounds: int) -> dict[str, float]:
    """Experts over dense, in eight processes."""
    runs = {name: partial(start, "ours", [path], STEPS) for name, path in CONFIGS.items()}
    found = alternate(runs, rounds)
    cpu = {name: [each["cpu_seconds_per_token"] for each in found[name]] for name in found}
    return ratio(cpu["experts"], cpu["dense"])


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
    options = parser("experts", __doc__, rounds=15)
    options.add_argument("--rounds-3d", type=int, default=5, help="0: not in eight processes")
    options.add_argument("--loss", action="store_true", help="compare held-out losses, too")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    init_distributed(store=dist.HashStore())
    results = measure(chosen.rounds)
    dist.destroy_process_group()
    if chosen.rounds_3d:
        results["eight_processes_experts_over_dense"] = measure_3d(chosen.rounds_3d)
    if chosen.loss:
        results["heldout_loss"] = measure_loss()
    write(chosen.json, results, "transformers")


if __name__ == "__main__":
    run_command(main)
