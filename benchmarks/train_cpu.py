"""Compares a run in 3D with one process, with torchrun and with Hugging Face's Llama: `python -m
benchmarks.train_cpu`, after `make data`

For two models, of 1.8 and of 29 million parameters:

Speed: whole runs of train.py, by the commands that people use, as metrics.jsonl has it. Our
launcher (as `make train`), torchrun and tools.torchrun start 8 processes (tp 2 × pp 2 × dp_shard 2,
sequence parallelism, 1F1B); the last is the same model in one process.

CPU seconds (user and system) per token of all processes, and their peak of memory: training steps
alone, on the same tokens, by our 8 processes, by one, and by `transformers`' LlamaForCausalLM of
the same size in one process (eager PyTorch, SDPA, fused AdamW, the same micro-batches).

Start-up and warm-up steps do not count. Every process computes with one thread, so 8 of them on
several cores should be faster than one.

Each rank makes its own settings (runtime/start/host.py), however it was started. Only
the launcher can provide shared memory and a common session. Ours forks the ranks, so imported
modules are in memory and in the CPU caches once for all of them, and Linux divides the cores among
the processes. torchrun starts each rank in a session of its own, and Linux divides the cores among
sessions first (/proc/sys/kernel/sched_autogroup_enabled).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.compare import ROOT, alternate, cpu_seconds, parser, ratio, run_watched, write
from runtime.log.log_lines import read_records
from settings.checks import validate
from tools.command import run_command

ALONE = ["parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1"]
LAPTOP = ["configs/laptop.yaml"]  # a configuration, and what is changed in it
SIZES = {
    "1.8M": LAPTOP,
    "29M": [*LAPTOP, "model.dim=512", "model.num_layers=8", "model.num_heads=8",
            "model.num_kv_heads=4", "model.ffn_dim=1536", "train.seq_len=256",
            "train.global_batch_size=16", "train.micro_batch_size=4"],
}  # fmt: skip
RUNS = {  # how people start train.py
    "ours": ["-m", "tools.launch", "--nproc-per-node", "8"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8",
                 "train.py"],
    "tools.torchrun": ["-m", "tools.torchrun", "--standalone", "--nproc-per-node", "8", "train.py"],
    "one process": ["train.py"],
}  # fmt: skip
STEPS = ("ours", "one process", "Hugging Face")  # whose CPU seconds are measured
# result → the figure, and the programs whose figures are divided
SPEED, CPU = "tokens_per_second", "cpu_seconds_per_token"
RATIOS = {
    "cpu_of_ours_over_one_process": (CPU, "ours", "one process"),
    "cpu_of_one_process_over_hugging_face": (CPU, "one process", "Hugging Face"),
    "speed_of_torchrun_over_ours": (SPEED, "torchrun", "ours"),
    "speed_of_tools_torchrun_over_ours": (SPEED, "tools.torchrun", "ours"),
    "speed_of_ours_over_one_process": (SPEED, "ours", "one process"),
    "speed_of_torchrun_over_one_process": (SPEED, "torchrun", "one process"),
}
WARMUP = 3  # steps
Figures = dict[str, float]


# --- training steps alone, in each process of a program ---


def random_batches(config: Any, count: int) -> list:
    generator = torch.Generator().manual_seed(0)
    vocab_size, train = config.model.vocab_size, config.train
    shape = train.global_batch_size, train.seq_len + 1
    return [torch.randint(vocab_size, shape, generator=generator) for _ in range(count)]


def build(config: Any) -> Any:
    """Our training step, in this process group."""
    from proofs.parity.run import make_step

    validate(config, dist.get_world_size())
    return make_step(config)


def our_step(train: Any) -> Any:
    """A step with its number and the rows of the global batch; returns the loss."""

    def step(i: int, rows: Any) -> float:
        mine = rows.chunk(train.mesh.batch.size)[train.mesh.batch.rank]
        return train(i, mine[:, :-1], mine[:, 1:]).loss.item()

    return step


def hugging_face_step(config: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from runtime.start.host import share_cores
    from tools.huggingface.config import config_json

    share_cores(1)  # as in our program
    same = config_json(config.model, dtype="float32", max_length=config.train.seq_len)
    return plain_step(config, LlamaForCausalLM(LlamaConfig(**same, attn_implementation="sdpa")))


def plain_step(config: Any, model: Any) -> Any:
    """A step of a model of `transformers`, with our micro-batches; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = config.train.global_batch_size * config.train.seq_len

    def step(i: int, rows: Any) -> float:
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


def inside(program: str, settings: list[str], steps: int, signals: Any, store: Any) -> None:
    """Trains in this process, one of the program's; rank 0 prints the CPU seconds per token."""
    from runtime.start.init import init_distributed
    from settings.load import load_config

    torch.set_num_threads(1)
    config = load_config(settings[0], settings[1:])
    if program == "Hugging Face":
        step = hugging_face_step(config)
    else:
        init_distributed(store=store)
        step = our_step(build(config))
    train, began = config.train, 0.0
    for i, rows in enumerate(random_batches(config, WARMUP + steps)):
        if i == WARMUP:
            if dist.is_initialized():
                dist.barrier()
            began = cpu_seconds()
        step(i, rows)
    took = torch.tensor(cpu_seconds() - began, dtype=torch.float64)
    speaks = True
    if dist.is_initialized():
        dist.all_reduce(took)
        speaks = dist.get_rank() == 0
        dist.destroy_process_group()
    if speaks:
        tokens = steps * train.global_batch_size * train.seq_len
        print(json.dumps({CPU: took.item() / tokens}), flush=True)


# --- the comparison ---


def start(program: str, settings: list[str], steps: int) -> Figures:
    """Runs the steps of one program; returns its CPU seconds, and the peak of its memory."""
    alone = ALONE if program != "ours" else []
    command = [sys.executable, "-m", "benchmarks.train_cpu", "--inside", program,
               "--steps", str(steps), *settings, *alone]  # fmt: skip
    output, peak = run_watched(command)
    return {**json.loads(output.strip().splitlines()[-1]), "peak_memory_gib": peak / 2**30}


def whole_run(way: str, settings: list[str], steps: int) -> Figures:
    """Trains by a command that people use; returns its speed."""
    alone = ALONE if way == "one process" else []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *RUNS[way], *settings, *alone, f"run.dir={folder}/run",
                   f"train.steps={WARMUP + steps}", "run.log_interval=1",
                   "checkpoint.interval=never", "train.eval_interval=0"]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # of one process too
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{way} failed:\n{done.stdout}{done.stderr}")
        lines = read_records(Path(folder, "run"))
    tokens = lines[-1]["tokens"] - lines[WARMUP - 1]["tokens"]
    return {SPEED: tokens / sum(line["step_seconds"] for line in lines[WARMUP:])}


def compare(size: str, rounds: int, steps: int) -> dict[str, Any]:
    given = SIZES[size], steps
    programs = {(SPEED, way): partial(whole_run, way, *given) for way in RUNS}
    programs |= {(CPU, name): partial(start, name, *given) for name in STEPS}
    found = alternate(programs, rounds)

    def figures(figure: str, name: str) -> list[float]:
        return [each[figure] for each in found[figure, name]]

    return {
        name: ratio(figures(figure, one), figures(figure, other))
        for name, (figure, one, other) in RATIOS.items()
    } | {
        "medians": {
            f"{figure}, {name}": statistics.median(figures(figure, name)) for figure, name in found
        },
        "peak_memory_gib": {
            name: statistics.median(each["peak_memory_gib"] for each in found[CPU, name])
            for name in STEPS
        },
    }


def sessions() -> bool | None:
    """Whether the kernel divides the cores among sessions first; None if it has no such setting."""
    setting = Path("/proc/sys/kernel/sched_autogroup_enabled")
    return setting.read_text().strip() == "1" if setting.exists() else None


def main() -> int:
    options = parser("train_cpu", __doc__, rounds=5)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--size", choices=SIZES, action="append", help="default: both")
    options.add_argument("--inside", help=argparse.SUPPRESS)
    options.add_argument("settings", nargs="*", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    given = chosen.inside, chosen.settings, chosen.steps
    if chosen.inside:
        from tools.launch import start_processes  # as `make train` starts them

        return start_processes(8 if chosen.inside == "ours" else 1, inside, *given).status()
    sizes = {size: compare(size, chosen.rounds, chosen.steps) for size in chosen.size or SIZES}
    results = {"sched_autogroup_enabled": sessions(), "rounds": chosen.rounds, "sizes": sizes}
    write(chosen.json, results, "transformers")
    return 0


if __name__ == "__main__":
    run_command(main)
