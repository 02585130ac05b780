"""Compares the CPU seconds per token of a mixture of experts with a dense model's and with Hugging
Face's Mixtral: `python -m benchmarks.experts_cpu`

Programs train in one process with one thread, on the same tokens, in float32:

- experts: configs/laptop_moe.yaml;
- dense: configs/laptop.yaml, which computes each token with as many weights;
- experts as Mixtral: the first with Mixtral's router, which has neither bias, scale nor loss;
- Mixtral: `transformers`' MixtralForCausalLM with the same weights (eager PyTorch, SDPA, fused
  AdamW, the same micro-batches), once with its loop over experts and once with torch's grouped_mm,
  its default. Its first loss must be that of "experts as Mixtral".

They take turns, step by step; each step is timed by the process's CPU time (user and system).
Ratios are computed within a turn, and their median is kept. Absolute times mean little on a CPU.
The first two are also compared as `make train` runs them, in eight processes, in turns of a few
steps: the CPU time is the sum over processes, without start-up.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.about import about
from benchmarks.train_cpu import ONE_PROCESS, random_batches, start
from parallel.mesh import build_mesh
from runtime.start.init_distributed import init_distributed
from tools.command import CommandParser, run_command
from tools.huggingface.config import CONFIG, config_json, parameters
from training.build import build_stages
from training.config import Config
from training.load_config import load_config
from training.step import TrainStep

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/experts_cpu.json"
DENSE, EXPERTS = "configs/laptop.yaml", "configs/laptop_moe.yaml"
AS_MIXTRAL = [
    "model.router=softmax_renormalised",
    "model.router_scale=1.0",
    "model.router_bias_rate=0.0",
    "model.router_aux_weight=0.0",
]
# result → the programs whose times are divided
RATIOS = {
    "experts_over_dense": ("experts", "dense"),
    "as_mixtral_over_mixtral_loop": ("experts as Mixtral", "Mixtral, loop"),
    "as_mixtral_over_mixtral_grouped_mm": ("experts as Mixtral", "Mixtral, grouped_mm"),
}
WARMUP = 2
STEPS = 6  # of a turn in eight processes
SAME = 1e-5  # relative difference of two losses in float32

Step = Callable[[int, Tensor], float]  # (number of the step, rows [B, S + 1]) → loss


def ours(path: str, overrides: list[str]) -> tuple[Config, TrainStep]:
    config = load_config(str(ROOT / path), [*ONE_PROCESS, *overrides])
    config.validate(1)
    mesh = build_mesh(config.parallel.mesh_sizes(1), "cpu", config.model.has_experts)
    return config, TrainStep(config, mesh, build_stages(config, mesh))


def our_step(train: TrainStep) -> Step:
    return lambda i, rows: train(i, rows[:, :-1], rows[:, 1:]).loss.item()


def mixtral(config: Config, train: TrainStep, implementation: str) -> Any:
    """transformers' model with the weights of `train`."""
    from transformers import AutoModelForCausalLM

    weights = {each.name: each.sharded.to_local() for each in train.weights}
    tensors = {}
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


def mixtral_step(config: Config, model: Any) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = config.train.global_batch_size * config.train.seq_len

    def step(i: int, rows: Tensor) -> float:
        total = 0.0
        for part in rows.split(config.train.micro_batch_size):
            logits = model(input_ids=part[:, :-1]).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum")
            (loss / tokens).backward()
            total += loss.item() / tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def measure(turns: int) -> dict[str, Any]:
    programs: dict[str, Step] = {
        "dense": our_step(ours(DENSE, [])[1]),
        "experts": our_step(ours(EXPERTS, ["parallel.ep=1"])[1]),
    }
    config, train = ours(EXPERTS, ["parallel.ep=1", *AS_MIXTRAL])
    programs["experts as Mixtral"] = our_step(train)
    for name, implementation in (("loop", "eager"), ("grouped_mm", "grouped_mm")):
        step = mixtral_step(config, mixtral(config, train, implementation))
        programs[f"Mixtral, {name}"] = step
    shape = config.model.vocab_size, config.train.global_batch_size, config.train.seq_len
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn, rows in enumerate(random_batches(*shape, WARMUP + turns)):
        losses = {}
        for name, step in programs.items():
            started = time.process_time()
            losses[name] = step(turn, rows)
            if turn >= WARMUP:
                times[name].append(time.process_time() - started)
        if turn == 0:
            for name in ("Mixtral, loop", "Mixtral, grouped_mm"):
                difference = abs(losses[name] / losses["experts as Mixtral"] - 1)
                assert difference < SAME, (name, losses)
    ratios = {key: ratio(times[one], times[other]) for key, (one, other) in RATIOS.items()}
    tokens = config.train.global_batch_size * config.train.seq_len
    seconds = {name: statistics.median(each) / tokens for name, each in times.items()}
    return {"turns": turns, "cpu_seconds_per_token": seconds, "ratios": ratios}


def ratio(times: list[float], others: list[float]) -> dict[str, float]:
    found = [a / b for a, b in zip(times, others, strict=True)]
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def measure_3d(turns: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {EXPERTS: [], DENSE: []}
    for _ in range(turns):
        for path, found in times.items():
            result, _ = start("ours", 8, {"config": path, "overrides": []}, [], STEPS)
            found.append(result["cpu_seconds_per_token"])
    return {"turns": turns, "experts_over_dense": ratio(*times.values())}


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--turns-3d", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    init_distributed(store=dist.HashStore())
    results = {**about("transformers"), **measure(arguments.turns)}
    dist.destroy_process_group()
    results["eight_processes"] = measure_3d(arguments.turns_3d)
    print(json.dumps(results, indent=1))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
