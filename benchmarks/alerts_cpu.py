"""What alarms, numbers and the command after each commit cost: `python -m benchmarks.alerts_cpu`

Writes results/alerts_cpu.json. CPU seconds, by the operating system's own count, because two shared
cores cannot time anything else:

    rank 0       starting the companion, once in a start, and asking at each logged step whether it
                 is alive, beside the CPU seconds of a step of `make train` on all its ranks
    companion    its start, and following a run that logs ten steps in a second, with an endpoint
                 that is scraped every second
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from benchmarks.about import about
from tests.alert_helpers import FedCompanion, wait_until
from tools.command import CommandParser, run_command

RESULTS = Path(__file__).parent / "results" / "alerts_cpu.json"
STEPS, PER_SECOND = 300, 10
TICKS = os.sysconf("SC_CLK_TCK")
RECORD = {"tokens": 1, "lr": 3e-4, "grad_norm": 1.0, "tokens_per_second": 1e4, "mfu": None,
          "step_seconds": 0.1, "data_seconds": 0.0, "peak_memory_bytes": 1 << 30}  # fmt: skip


def cpu_seconds(pid: int) -> float:
    """User and system time of a running process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def starting_on_rank_0(times: int = 30) -> float:
    """CPU seconds of the parent for starting a process like the companion; median."""
    measured = []
    for _ in range(times):
        began = time.thread_time()
        process = subprocess.Popen(
            [sys.executable, "-c", ""], stdin=subprocess.PIPE, start_new_session=True
        )
        measured.append(time.thread_time() - began)
        process.communicate()
    return statistics.median(measured)


def asking(times: int = 20_000) -> float:
    """CPU seconds of one `poll` of a running process."""
    with subprocess.Popen(["sleep", "600"]) as process:
        began = time.thread_time()
        for _ in range(times):
            process.poll()
        seconds = (time.thread_time() - began) / times
        process.kill()
    return seconds


def following(folder: Path, port: int) -> dict[str, float]:
    """CPU seconds of a companion: at its start, and per second of following a run."""
    with FedCompanion(folder, prometheus=str(port)) as companion:
        companion.event("start", step=0, world_size=8, began=time.time())

        def answers() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5):
                    return True
            except OSError:
                return False

        wait_until(answers)
        start, began = cpu_seconds(companion.process.pid), time.monotonic()
        for step in range(1, STEPS + 1):
            companion.step(step, **RECORD)
            companion.event("spent", step=step, seconds={"steps": 0.1})
            if step % PER_SECOND == 0:
                answers()
            time.sleep(1 / PER_SECOND)
        took = time.monotonic() - began
        seconds = cpu_seconds(companion.process.pid) - start
        memory = Path(f"/proc/{companion.process.pid}/status").read_text()
        resident = next(line for line in memory.splitlines() if line.startswith("VmRSS"))
        companion.event("end", state="finished", step=STEPS, reason="")
        companion.end()
    return {
        "start_cpu_seconds": start,
        "cpu_seconds_per_second": seconds / took,
        "resident_bytes": int(resident.split()[1]) * 1024,
    }


def step_of_make_train() -> float:
    """CPU seconds of a step of configs/laptop.yaml, all ranks together: of a run of 8 steps less
    those of a run of 2."""

    def run(steps: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tools.launch", "configs/laptop.yaml"]
            command += [f"train.steps={steps}", "train.eval_interval=0"]
            command += ["checkpoint.interval=never", f"run.dir={folder}/run"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return (run(8) - run(2)) / 6


def main() -> None:
    parser = CommandParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--port", type=int, default=9477)
    options = parser.parse_args()
    step = step_of_make_train()
    with tempfile.TemporaryDirectory() as folder:
        companion = following(Path(folder), options.port)
    found = {
        **about(),
        "rank_0": {"start_cpu_seconds": starting_on_rank_0(), "logged_step_cpu_seconds": asking()},
        "companion": companion,
        "step_cpu_seconds_of_make_train": step,
    }
    found["rank_0_share_of_a_step"] = found["rank_0"]["logged_step_cpu_seconds"] / step  # type: ignore[index]
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    run_command(main)
