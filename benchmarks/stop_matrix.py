"""Requests a real run to stop, in every way: `python -m benchmarks.stop_matrix`

The signals are SIGINT (Ctrl-C), SIGTERM and SIGHUP. They are sent to our launcher, to its process
group as by a terminal, to one rank, or to torchrun; while the run starts, in a step, while a
checkpoint is written, or in an evaluation. Each row has the seconds until all processes have
ended, the steps that are not in the newest checkpoint, the lines printed after the signal (and how
many of them are not Lattice's), and the exit status. Seconds are specific to this machine, and
include a step, a save and Python's shutdown.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.about import about
from tools.command import CommandParser, run_command

ROOT = Path(__file__).parent.parent
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
TARGETS = ("launcher", "group", "one rank", "torchrun")
PHASES = ("start-up", "step", "save", "evaluation")
WORLD = 2
PATIENCE_SECONDS = 600
OUR_LINES = re.compile(
    r"saved step-|stopped after step|SIG\w+ was received|step +\d+/|processes on this machine|"
    r"[\d,]+ parameters on|all 2 ranks|attention: |starting |"
    r"warning: checkpoint.interval is never|changed since"
)


@dataclass(frozen=True)
class Stop:
    """The result of one stop request."""

    signal: str
    target: str
    phase: str
    seconds: float  # until all processes had ended
    steps_made: int
    steps_lost: int  # made, but not in the newest checkpoint
    lines: int  # printed after the signal
    not_ours: int  # those of them not printed by Lattice
    announced: int  # those of them that announce the received signal and what happens next
    exit_status: int
    state: str  # of status.json


def stop(number: str, target: str, phase: str, config: str, folder: Path) -> Stop:
    """Starts `config` in `folder`/run, requests a stop in `phase`, and waits until it has ended."""
    run, log = folder / "run", folder / "log"
    overrides = [
        f"run.dir={run}",
        "run.log_interval=1",
        "train.steps=1000000",
        "checkpoint.interval=never",
        "train.eval_interval=0",
    ]
    overrides += {
        "save": ["checkpoint.interval=2"],
        "evaluation": ["train.eval_interval=2", "train.eval_samples=1000000000"],
    }.get(phase, [])
    program = ["-m", "tools.launch", "--nproc-per-node", str(WORLD)]
    if target == "torchrun":
        program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD),
                   "train.py"]  # fmt: skip
    with open(log, "w") as output:
        running = subprocess.Popen(
            [sys.executable, *program, config, *overrides],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_hear_all,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        _wait_for(PHASES_BEGIN[phase], run, log, running)
        before, asked = log.read_text(), time.monotonic()
        everyone = [running, *_ranks(running.pid)]
        if target == "group":
            os.killpg(running.pid, signal.Signals[number])
        else:
            victim = everyone[-1] if target == "one rank" else running
            os.kill(victim.pid, signal.Signals[number])
        status = running.wait(PATIENCE_SECONDS)
        psutil.wait_procs(everyone[1:], timeout=PATIENCE_SECONDS)
        seconds = time.monotonic() - asked
    finally:
        for process in _ranks(running.pid):
            with contextlib.suppress(psutil.Error):
                process.kill()
        running.kill()
        running.wait()
    said = log.read_text()[len(before) :].splitlines()
    made = _last_step(run)
    latest = run / "checkpoints" / "latest"
    saved = int(latest.read_text()[5:]) if latest.exists() else 0
    ended = run / "status.json"
    return Stop(
        number,
        target,
        phase,
        round(seconds, 1),
        made,
        made - saved,
        len(said),
        sum(not OUR_LINES.match(line) for line in said),
        sum("all ranks stop after" in line for line in said),
        status if status >= 0 else 128 - status,
        json.loads(ended.read_text())["state"] if ended.exists() else "",
    )


def _hear_all() -> None:
    """Restores the default handling of signals in the child: background processes ignore Ctrl-C."""
    for name in SIGNALS:
        signal.signal(signal.Signals[name], signal.SIG_DFL)


def _ranks(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _last_step(run: Path) -> int:
    try:
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    except (OSError, IndexError):
        return 0


def _wait_for(
    begun: Callable[[Path, str, int], bool], run: Path, log: Path, running: subprocess.Popen
) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not begun(run, log.read_text(), running.pid):
        if running.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run did not reach this phase:\n{log.read_text()}")
        time.sleep(0.002)


def _imports(run: Path, said: str, pid: int) -> bool:
    """Whether every rank handles signals. The run folder does not exist yet at this point."""
    listening = sum(catches(process.pid) for process in _ranks(pid))
    return listening >= WORLD


def catches(pid: int) -> bool:
    """Whether a process has a handler for SIGUSR1, as ranks that handle signals do (Linux)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16)
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)


def _in_evaluation(run: Path, said: str, pid: int) -> bool:
    """Whether the endless evaluation after the second step has begun. That cannot be observed from
    outside, so this waits 2 s after the first step's line."""
    if not re.search(r"^step +1/", said, re.MULTILINE):
        return False
    time.sleep(2)
    return True


PHASES_BEGIN: dict[str, Callable[[Path, str, int], bool]] = {
    "start-up": _imports,
    "step": lambda run, said, pid: bool(re.search(r"^step +3/", said, re.MULTILINE)),
    "save": lambda run, said, pid: any((run / "checkpoints").glob("partial-*")),
    "evaluation": _in_evaluation,
}


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/stop_matrix.json")
    options = parser.parse_args()
    config = ROOT / "configs/laptop.yaml"
    rows = []
    print("signal   target    phase        seconds  made  lost  lines  not ours  status  state")
    for target in TARGETS:
        for phase in PHASES:
            for number in SIGNALS:
                with tempfile.TemporaryDirectory(prefix="stop-") as folder:
                    row = stop(number, target, phase, _small(config, Path(folder)), Path(folder))
                rows.append(asdict(row))
                text = (
                    f"{row.signal:8} {row.target:9} {row.phase:11} {row.seconds:8.1f} "
                    f"{row.steps_made:5} {row.steps_lost:5}"
                )
                print(
                    f"{text} {row.lines:6} {row.not_ours:9} {row.exit_status:7}  {row.state}",
                    flush=True,
                )
    options.json.write_text(json.dumps({**about(), "world": WORLD, "rows": rows}, indent=1) + "\n")


def _small(config: Path, folder: Path) -> str:
    """Writes the laptop configuration for two ranks, with very short steps; returns its path."""
    import yaml

    raw = yaml.safe_load(config.read_text())
    raw["model"] |= {"dim": 32, "num_layers": 2, "ffn_dim": 64}
    raw["parallel"] = {"dp_shard": WORLD}
    raw["train"] |= {"seq_len": 32, "global_batch_size": 8, "micro_batch_size": 2}
    raw["data"]["path"] = str(ROOT / raw["data"]["path"])
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    return str(folder / "config.yaml")


if __name__ == "__main__":
    run_command(main)
