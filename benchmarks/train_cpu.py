"""Compares the CPU seconds per token of a 3D run, one process of ours and Hugging Face's Llama:
`python -m benchmarks.train_cpu`

Three programs train on the same tokens: 8 processes (tp 2 × pp 2 × dp_shard 2, sequence parallel,
1F1B), the same model in one process, and `transformers`' LlamaForCausalLM of the same size in one
process (eager PyTorch, SDPA, fused AdamW, the same micro-batches). They alternate for several
rounds. Each reports its processes' CPU time (user and system) per token, without start-up and
warm-up steps. Ratios are computed within a round, and their median is kept. Absolute times mean
little on a CPU.

The 8 processes are started as by `make train`. Peak memory is the sum of the proportional set sizes
(shared pages counted once) of all of them and of the process from which they are forked, sampled
during their run.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.about import about
from tools.command import CommandParser, run_command

ROOT = Path(__file__).parent.parent
SIZES = {
    # The laptop default, and half its batch: 4096 tokens per step, for comparison with earlier
    # measurements of others.
    "laptop": {"config": "configs/laptop.yaml", "overrides": []},
    "small": {
        "config": "configs/laptop.yaml",
        "overrides": [
            *(
                "model.dim=128",
                "model.num_layers=4",
                "model.num_heads=4",
                "model.num_kv_heads=2",
                "model.ffn_dim=384",
            ),
            *(
                "model.vocab_size=4096",
                "train.seq_len=128",
                "train.global_batch_size=32",
                "train.micro_batch_size=16",
            ),
        ],
    },
}
ONE_PROCESS = ["parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1"]


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure_ours(
    store: Any, config_path: str, overrides: list[str], warmup: int, steps: int
) -> dict | None:
    """Trains in this process (or in each of 8); returns on rank 0 the CPU seconds per token, summed
    over the processes."""
    import torch
    import torch.distributed as dist

    from parallel.mesh import build_mesh
    from runtime.start.init_distributed import init_distributed
    from training.build import build_stages
    from training.load_config import load_config
    from training.step import TrainStep

    init_distributed(store=store)
    config = load_config(config_path, overrides)
    config.validate(dist.get_world_size())
    sizes = config.parallel.mesh_sizes(dist.get_world_size())
    mesh = build_mesh(sizes, "cpu", config.model.has_experts)
    step = TrainStep(config, mesh, build_stages(config, mesh))
    batches = random_batches(
        config.model.vocab_size,
        config.train.global_batch_size,
        config.train.seq_len,
        warmup + steps,
    )
    mine = [batch.chunk(mesh.dp_size)[mesh.dp_rank] for batch in batches]
    started = 0.0
    for i, rows in enumerate(mine):
        if i == warmup:
            dist.barrier()
            started = cpu_seconds()
        step(i, rows[:, :-1], rows[:, 1:])
    used = torch.tensor(cpu_seconds() - started, dtype=torch.float64)
    dist.all_reduce(used)
    tokens = steps * config.train.global_batch_size * config.train.seq_len
    speaks = dist.get_rank() == 0
    dist.destroy_process_group()
    return {"cpu_seconds_per_token": used.item() / tokens} if speaks else None


def measure_hugging_face(config_path: str, overrides: list[str], warmup: int, steps: int) -> dict:
    """Trains LlamaForCausalLM in this process; returns the CPU seconds per token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from training.load_config import load_config

    config = load_config(config_path, overrides)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.model.vocab_size,
            hidden_size=config.model.dim,
            intermediate_size=config.model.ffn_dim,
            num_hidden_layers=config.model.num_layers,
            num_attention_heads=config.model.num_heads,
            num_key_value_heads=config.model.num_kv_heads,
            attn_implementation="sdpa",
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = random_batches(
        config.model.vocab_size,
        config.train.global_batch_size,
        config.train.seq_len,
        warmup + steps,
    )
    started = 0.0
    for i, batch in enumerate(batches):
        if i == warmup:
            started = cpu_seconds()
        for rows in batch.split(config.train.micro_batch_size):
            logits = model(input_ids=rows[:, :-1]).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum")
            (loss / (config.train.global_batch_size * config.train.seq_len)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    tokens = steps * config.train.global_batch_size * config.train.seq_len
    return {"cpu_seconds_per_token": (cpu_seconds() - started) / tokens}


def random_batches(vocab_size: int, batch_size: int, seq_len: int, count: int) -> list:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(vocab_size, (batch_size, seq_len + 1), generator=generator)
        for _ in range(count)
    ]


def start(
    program: str, processes: int, size: dict, extra: list[str], steps: int
) -> tuple[dict, int]:
    """Runs one program; returns its result, and the peak of its processes' summed proportional set
    sizes in bytes."""
    command = [sys.executable, "-m", "benchmarks.train_cpu", "--inside", program, "--processes",
               str(processes)]  # fmt: skip
    command += ["--steps", str(steps), size["config"], *size["overrides"], *extra]
    running = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    peak = 0
    while running.poll() is None:
        peak = max(peak, summed_pss(running.pid))
        time.sleep(0.5)
    assert running.stdout is not None
    output = running.stdout.read()
    if running.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return json.loads(output.strip().splitlines()[-1]), peak


def inside(
    store: Any, signals: Any, program: str, config_path: str, overrides: list[str], steps: int
) -> None:
    """Measures `program` in each process."""
    import torch

    from runtime.start.init_distributed import share_cores

    torch.set_num_threads(1)
    if program == "ours":
        result = measure_ours(store, config_path, overrides, 3, steps)
    else:
        share_cores(1)  # as in our program
        result = measure_hugging_face(config_path, overrides, 3, steps)
    if result is not None:
        print(json.dumps(result), flush=True)


def summed_pss(pid: int) -> int:
    """The summed proportional set sizes in bytes of the descendants of `pid` (Linux; 0
    elsewhere)."""
    import psutil

    total = 0
    try:
        for child in psutil.Process(pid).children(recursive=True):
            total += getattr(child.memory_full_info(), "pss", 0)
    except psutil.Error:
        pass
    return total


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--inside", choices=["ours", "hugging_face"], help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/train_cpu.json")
    parser.add_argument("config", nargs="?")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if arguments.inside:
        what = (arguments.inside, arguments.config, arguments.overrides, arguments.steps)
        from tools.launch import start_processes  # as `make train` starts them

        sys.exit(start_processes(arguments.processes, inside, *what).status())

    results: dict = {**about("transformers"), "sizes": {}}
    for name, size in SIZES.items():
        rounds, peaks = [], []
        for _ in range(arguments.rounds):
            many, peak = start("ours", 8, size, [], arguments.steps)
            one, _ = start("ours", 1, size, ONE_PROCESS, arguments.steps)
            other, _ = start("hugging_face", 1, size, [], arguments.steps)
            rounds.append([r["cpu_seconds_per_token"] for r in (many, one, other)])
            peaks.append(peak)
        ratios = {
            "3d_over_one_process": [many / one for many, one, _ in rounds],
            "one_process_over_hugging_face": [one / other for _, one, other in rounds],
        }
        results["sizes"][name] = {
            **{
                key: {"median": statistics.median(v), "min": min(v), "max": max(v)}
                for key, v in ratios.items()
            },
            "peak_memory_gib_of_8_processes": max(peaks) / 2**30,
            "rounds": arguments.rounds,
        }
        print(name, json.dumps(results["sizes"][name], indent=1), flush=True)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
