"""Compares the tokens per second of launchers: `python -m benchmarks.launchers [--rounds N]`

The same training runs as 8 processes (tp 2 × pp 2 × dp_shard 2), started by torchrun and by our
launcher, and as a single process: about 15 minutes on two quiet cores. They alternate for several
rounds; ratios are computed within a round, and their medians are kept. Every process computes with
one thread, so 8 processes on two cores should be faster than one process, which uses one core.

Each rank makes its own settings (runtime/start/init_distributed.py), however it was started. Only
the launcher can provide shared memory and a common session. Ours forks the ranks, so imported
modules are in the CPU caches once for all of them, and Linux divides the cores among the processes.
torchrun starts each rank in a separate session, and Linux divides the cores among sessions first
(/proc/sys/kernel/sched_autogroup_enabled). Absolute numbers are specific to this machine.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.about import about
from tools.command import CommandParser, run_command

ROOT = Path(__file__).parent.parent
MANY, ONE = (
    ["parallel.tp=2", "parallel.pp=2", "parallel.dp_shard=2"],
    ["parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1"],
)
WAYS = {
    "torchrun": (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8", "train.py"],
        MANY,
    ),
    "ours": (["-m", "tools.launch", "--nproc-per-node", "8"], MANY),
    "one process": (["train.py"], ONE),
}
# (number of warm-up steps, number of timed steps, overrides)
SIZES: dict[str, tuple[int, int, list[str]]] = {
    "hidden 128, 4 layers, sequence 128": (
        2,
        24,
        [
            "model.dim=128",
            "model.num_layers=4",
            "train.seq_len=128",
            "train.global_batch_size=32",
            "train.micro_batch_size=8",
        ],
    ),
    "hidden 512, 8 layers, sequence 256": (
        1,
        4,
        [
            *(
                "model.dim=512",
                "model.num_layers=8",
                "model.num_heads=8",
                "model.num_kv_heads=4",
                "model.ffn_dim=1536",
            ),
            *("train.seq_len=256", "train.global_batch_size=16", "train.micro_batch_size=4"),
        ],
    ),
}
RATIOS = {
    "torchrun_over_ours": ("torchrun", "ours"),
    "ours_over_one": ("ours", "one process"),
    "torchrun_over_one": ("torchrun", "one process"),
}


def tokens_per_second(way: str, size: str) -> float:
    """The speed of one run without its warm-up steps."""
    program, parallel = WAYS[way]
    warmup, timed, overrides = SIZES[size]
    with tempfile.TemporaryDirectory(prefix="launchers-") as folder:
        overrides = [
            *overrides,
            *parallel,
            f"run.dir={folder}/run",
            f"train.steps={warmup + timed}",
            "run.log_interval=1",
        ]
        overrides += ["checkpoint.interval=never", "train.eval_interval=0"]
        done = subprocess.run(
            [sys.executable, *program, "configs/laptop.yaml", *overrides],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            raise SystemExit(f"{way} failed:\n{done.stdout}{done.stderr}")
        lines = [
            json.loads(line)
            for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        ][warmup:]
    tokens = lines[0]["tokens"] / lines[0]["step"]  # per step
    return len(lines) * tokens / sum(line["step_seconds"] for line in lines)


def sessions() -> bool | None:
    """Whether the kernel divides the cores among sessions first; None if it has no such setting."""
    setting = Path("/proc/sys/kernel/sched_autogroup_enabled")
    return setting.read_text().strip() == "1" if setting.exists() else None


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/launchers.json")
    options = parser.parse_args()
    results: dict = {
        **about(),
        "sched_autogroup_enabled": sessions(),
        "rounds": options.rounds,
        "sizes": {},
    }
    for size in SIZES:
        rounds: list[dict[str, float]] = []
        for number in range(options.rounds):
            ways = list(WAYS) if number % 2 == 0 else list(reversed(WAYS))
            rounds.append({way: tokens_per_second(way, size) for way in ways})
        speeds = {way: statistics.median(each[way] for each in rounds) for way in WAYS}
        ratios = {name: [each[a] / each[b] for each in rounds] for name, (a, b) in RATIOS.items()}
        results["sizes"][size] = {
            "tokens_per_second": speeds,
            **{
                name: {"median": statistics.median(v), "min": min(v), "max": max(v)}
                for name, v in ratios.items()
            },
        }
        print(size, json.dumps(results["sizes"][size], indent=1), flush=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
