"""Compares the held-out loss of a mixture of experts with a dense model's: `python -m
benchmarks.experts_loss`

configs/laptop.yaml and configs/laptop_moe.yaml are trained with several seeds, from which initial
weights and the order of the data are drawn. Both compute each token with equally many weights, on
the same tokens; the router is the only addition. Each run is one process with one thread, as many
at a time as there are cores. The loss is that after the last step, in nats per token. Another
layout rounds otherwise; with experts that changes a few choices, after which the runs diverge, so
the loss of a seed can differ by some hundredths, much more than a dense model's.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.about import about
from model.transformer import num_active_parameters, num_parameters
from tools.command import CommandParser, run_command
from training.config import Config
from training.load_config import load_config

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/experts_loss.json"
SEEDS = (0, 1, 2)
CONFIGS = {"dense": "configs/laptop.yaml", "experts": "configs/laptop_moe.yaml"}
ALONE = ["parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1", "parallel.ep=1"]


def read(name: str) -> Config:
    return load_config(str(ROOT / CONFIGS[name]), [])


def router_parameters(config: Config) -> int:
    """The weights of all routers. Without experts there are none."""
    model = config.model
    layers = len(model.layers_with_experts)
    return layers * model.num_experts * model.dim


def same_work(dense: Config, experts: Config) -> bool:
    """Whether both compute each token with equally many weights, besides those of the router, and
    train on the same tokens."""
    active = num_active_parameters(experts.model) - router_parameters(experts)
    same = (dense.train, dense.optimizer, dense.data) == (
        experts.train,
        experts.optimizer,
        experts.data,
    )
    return same and active == num_active_parameters(dense.model)


def heldout_loss(name: str, seed: int, folder: Path) -> float:
    """Trains; returns the loss after the last step."""
    run = folder / f"{name}_{seed}"
    steps = read(name).train.steps
    command = [sys.executable, "train.py", CONFIGS[name], *ALONE, f"train.seed={seed}"]
    command += [f"train.eval_interval={steps}", "checkpoint.interval=never", f"run.dir={run}"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    last = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["step"] == steps
    loss: float = last["eval_loss"]
    print(f"{name:8} seed {seed}  {loss:.4f}", flush=True)
    return loss


def measure(seeds: tuple[int, ...]) -> dict[str, Any]:
    assert same_work(*(read(name) for name in CONFIGS))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {
            name: [pool.submit(heldout_loss, name, seed, Path(folder)) for seed in seeds]
            for name in CONFIGS
        }
        losses = {name: [run.result() for run in runs] for name, runs in running.items()}
    return {
        name: {
            "parameters": num_parameters(read(name).model),
            "active_parameters": num_active_parameters(read(name).model),
            "losses": losses[name],
            "mean": statistics.mean(losses[name]),
        }
        for name in CONFIGS
    }


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found = measure(SEEDS)
    print(f"\n{'model':8}{'parameters':>12}{'active':>12}{'held-out losses':>24}{'mean':>9}")
    for name, row in found.items():
        losses = "  ".join(f"{loss:.3f}" for loss in row["losses"])
        sizes = f"{row['parameters']:>12,}{row['active_parameters']:>12,}"
        print(f"{name:8}{sizes}{losses:>24}{row['mean']:>9.3f}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    results = {**about(), "seeds": list(SEEDS), "models": found}
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
