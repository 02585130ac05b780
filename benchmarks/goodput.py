"""Checks the simulator of tools/goodput against closed forms and against a real run that is killed
at random: `python -m benchmarks.goodput [--kills N]`

The run: configs/laptop.yaml made small, on 4 processes under tools.torchrun, saved every few
seconds. From outside, a random rank gets SIGKILL after exponentially distributed times. What saves,
commits and steps took on average is read from the run's ledger, as by `python -m tools.goodput
--run`; a restart lasts from the kill to the next step. The simulator then gets these averages and
the moments of the kills, and what it says was lost is compared with what was lost. That restarts
took R on average is thereby given; how many steps are made twice, which depends on what was
committed when, is not.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.about import about
from hardware import FAILURES_PER_GPU_DAY
from runtime.checkpoints.goodput import best_interval, effective_exactly, shares
from runtime.records.events import read_events
from runtime.records.ledger import account
from tools.command import CommandParser, run_command
from tools.goodput.simulate import Job, simulate
from tools.report.ledger import measure

ROOT = Path(__file__).parent.parent
WORLD = 4
MEAN_SECONDS = 10.0  # from the first step of a start to its kill
# (GPUs, seconds of a save, until it counts, of a restart)
CASES = ((64, 60, 300, 600), (256, 2, 2, 120), (256, 2, 60, 60), (1024, 0.5, 30, 300),
         (16_384, 2, 60, 900), (16_384, 60, 60, 900))  # fmt: skip


def closed_forms() -> list[dict[str, Any]]:
    """Simulated losses over those of the closed forms, at Young's interval; 50,000 failures."""
    rows = []
    for gpus, save, commit, restart in CASES:
        job = Job(
            nodes=gpus // 8,
            failures_per_node_day=FAILURES_PER_GPU_DAY * 8,
            save=save,
            commit=commit,
            restart=restart,
        )
        job = replace(job, interval=best_interval(save, job.mtbf))
        lost = 1 - simulate(job, 50_000 * job.mtbf).effective
        row = {
            "gpus": gpus,
            "save": save,
            "commit": commit,
            "restart": restart,
            "mtbf_over_interval_and_restart": job.mtbf / (job.interval + restart),
            "simulated_loss": lost,
            "over_first_order": lost / (1 - shares(job.costs, job.interval).effective),
        }
        if commit == save:
            row["over_exact"] = lost / (1 - effective_exactly(job.costs, job.interval))
        rows.append(row)
    return rows


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def ranks_of(agent: int) -> list[int]:
    """The processes of the ranks: the children of the agent's fork server."""
    try:
        found = [children(child) for child in children(agent)]
    except OSError:  # one has just ended
        return []
    return next((sorted(family) for family in found if len(family) == WORLD), [])


def starts_of(run: Path) -> int:
    """How many starts have made their first step."""
    if not (run / "events.jsonl").exists():
        return 0
    return sum(event["event"] == "started" for event in read_events(run))


def killed_run(folder: Path, kills: int, seed: int) -> tuple[Path, list[float]]:
    """Make the run; returns its folder, and when ranks were killed, in seconds since 1970."""
    raw = yaml.safe_load((ROOT / "configs/laptop.yaml").read_text())
    raw["model"] |= {"dim": 64, "ffn_dim": 128}
    raw["parallel"] |= {"tp": 2, "pp": 2, "dp_shard": 1}
    raw["train"] |= {"steps": 1_000_000, "seq_len": 64, "eval_interval": 0}
    raw["train"] |= {"global_batch_size": 16, "micro_batch_size": 2}
    raw["checkpoint"] |= {"interval": 6}
    raw["guard"] = {"replica_interval": 0}
    raw["run"] = {"dir": str(folder / "run"), "log_interval": 1}
    config, run = folder / "config.yaml", folder / "run"
    config.write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "tools.torchrun", "--standalone", "--local-addr", "localhost"]
    command += [f"--nproc-per-node={WORLD}", f"--max-restarts={kills + 3}", "train.py", str(config)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    draw, killed = random.Random(seed), []
    with open(folder / "log.txt", "wb") as log:
        agent = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            for number in range(kills + 1):
                while starts_of(run) <= number:
                    if agent.poll() is not None:
                        raise RuntimeError((folder / "log.txt").read_text()[-4000:])
                    time.sleep(0.05)
                time.sleep(draw.expovariate(1 / MEAN_SECONDS))
                if number < kills:
                    killed.append(time.time())
                    os.kill(draw.choice(ranks_of(agent.pid)), signal.SIGKILL)
            (run / "STOP").touch()
            agent.wait(120)
        finally:
            agent.kill()
    return run, killed


def seconds_between_saves(events: list[dict[str, Any]]) -> list[float]:
    """The seconds of steps between the saves of each start, in order."""
    found: list[float] = []
    made: dict[int, float] = {}  # steps done → seconds of steps in this start
    at, saved = 0, 0
    for event in events:
        if event["event"] == "start":
            at = saved = event["step"]
            made = {at: 0.0}
        elif event["event"] == "spent":
            before, at = made[at], event["step"]
            made[at] = before + event["seconds"].get("steps", 0.0)
        elif event["event"] == "checkpoint" and event["step"] in made:
            found.append(made[event["step"]] - made[saved])
            saved = event["step"]
    return found


def compare(events: list[dict[str, Any]], killed: list[float]) -> dict[str, Any]:
    """What was lost from the first step on, and what the simulator says."""
    spent = [event for event in events if event["event"] == "spent"]
    seconds, measured = account(events), measure(events)
    assert None not in (measured.interval, measured.save, measured.commit), "nothing was saved"
    origin = spent[0]["time"] - spent[0]["seconds"]["steps"]
    total = spent[-1]["time"] - origin
    # from each kill to the next step
    first = [line for line in spent if "start" in line["seconds"]][1:]
    restarts = [
        line["time"] - line["seconds"]["steps"] - at for line, at in zip(first, killed, strict=True)
    ]
    # A failure at a random moment finds itself in a long interval more often than in a short one:
    # on a busy machine, where steps take now this and now that, what counts is E[τ²]/E[τ].
    taus = seconds_between_saves(events)
    interval = sum(tau**2 for tau in taus) / sum(taus)
    job = Job(
        interval=interval,
        save=measured.save or 0.0,
        commit=(measured.save or 0.0) + (measured.commit or 0.0),
        restart=sum(restarts) / len(restarts),
    )
    gaps = [at - before for before, at in zip([origin, *killed[:-1]], killed, strict=True)]
    told = simulate(job, total, gaps=iter(gaps))
    lost = total - seconds["steps"]
    repeated = lost - sum(restarts) - seconds["saving"]  # the step in which a kill came included
    return {
        "kills": len(killed),
        "steps_kept": spent[-1]["step"],
        "seconds": total,
        "step_seconds": measured.step,
        "interval_seconds_median": measured.interval,
        "interval_seconds": interval,
        "save_seconds": measured.save,
        "commit_seconds": job.commit,
        "restart_seconds": job.restart,
        "restart_seconds_by_ledger": measured.restart,
        "measured": {"lost": lost, "repeated": repeated, "saving": seconds["saving"],
                     "effective": 1 - lost / total},
        "simulated": {"lost": told.total - told.steps, "repeated": told.repeated,
                      "saving": told.saving, "effective": told.effective},
        "lost_simulated_over_measured": (told.total - told.steps) / lost,
        "repeated_simulated_over_measured": told.repeated / repeated,
    }  # fmt: skip


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/goodput.json")
    options = parser.parse_args()
    if not (ROOT / "prepared/laptop").exists():
        sys.exit("the data is missing: run `make data` first")
    rows = closed_forms()
    with tempfile.TemporaryDirectory() as name:
        run, killed = killed_run(Path(name), options.kills, options.seed)
        drill = compare(read_events(run), killed)
    results = {**about(), "processes": WORLD, "closed_forms": rows, "drill": drill}
    print(json.dumps(results, indent=1))
    for row in rows:
        if row["mtbf_over_interval_and_restart"] > 50 and abs(row["over_first_order"] - 1) > 0.05:
            sys.exit("the simulator disagrees with the closed form")
    if abs(drill["lost_simulated_over_measured"] - 1) > 0.15:
        sys.exit("the simulator disagrees with the drill")
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
