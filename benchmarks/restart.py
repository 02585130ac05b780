"""Where the time of a restart goes, and how much of it was saved: `python -m benchmarks.restart
[--base COMMIT] [--rounds N]`

A run of configs/laptop.yaml on 8 processes is saved after step 4, and one rank kills itself after
step 6. Measured is the time from then until step 6 is made again, in these parts:

    launch     the launcher notices, ends the other ranks, and creates the new processes
    python     Python starts, up to the first line of our code
    import     imports
    join       all ranks find each other
    mesh       the configuration is checked, and the mesh built
    data, lease, verify, build, load, listeners, step: as in runtime/start/parts.py
    repeated   the steps that were lost, after the first

Three ways, which alternate for several rounds: `before` is torchrun with the program as it was at
the commit --base (in a clone), `torchrun` is torchrun with the program as it is, and `after` is
tools.torchrun. Rounds are paired: the quotients are of the same round, and their medians are kept,
because the machine may be busy with other work. A part ends when the last rank has ended it
(benchmarks/restart_marks.py notes it in each). Absolute numbers are specific to this machine, where
8 processes share few cores: on a node with as many cores as processes, importing takes what it
takes one process.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.about import about
from tools.command import CommandParser, run_command

ROOT = Path(__file__).parent.parent
MARKS = ROOT / "benchmarks" / "restart_marks.py"
BASE = "60fb9ea7cc1b"  # before restarts were shortened
WORLD, SAVED, DIES = 8, 4, 6
# part → the mark at which it ends
PARTS = {
    "launch": "process",
    "python": "first line",
    "import": "imported",
    "join": "joined",
    "mesh": "mesh",
    "data": "data",
    "lease": "lease",
    "verify": "checked",
    "build": "built",
    "load": "loaded",
    "listeners": "listeners",
    "step": f"step {SAVED + 1}",
    "repeated": f"step {DIES}",
}
TORCHRUN = ["-m", "torch.distributed.run"]
OURS = ["-m", "tools.torchrun"]
OPTIONS = ["--standalone", "--local-addr", "localhost", f"--nproc-per-node={WORLD}",
           "--max-restarts=1"]  # fmt: skip


def restart(launcher: list[str], tree: Path, folder: Path) -> dict[str, float]:
    """The seconds of the parts of one restart of the program in `tree`, in a new `folder`."""
    folder.mkdir()
    marks = folder / "marks.jsonl"
    settings = [
        "configs/laptop.yaml",
        f"data.path={ROOT / 'prepared/laptop'}",
        f"run.dir={folder / 'run'}",
        f"train.steps={DIES + 1}",
        f"checkpoint.interval={SAVED}",
        "train.eval_interval=0",
        "train.global_batch_size=16",
        "train.micro_batch_size=4",
        "run.log_interval=1",
    ]
    program = [str(MARKS), "train.py"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RESTART_MARKS": str(marks),
        "RESTART_DEATH": f"{WORLD - 1}:{DIES}",
    }
    done = subprocess.run(
        [sys.executable, *launcher, *OPTIONS, *program, *settings],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{launcher} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return read_parts([json.loads(line) for line in marks.read_text().splitlines()])


def read_parts(marks: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by part, from the marks of all ranks. Each part ends with its last rank."""
    (killed,) = (mark["time"] for mark in marks if mark["mark"] == "killed")
    after = [
        {**mark, "mark": f"step {mark['step']}" if mark["mark"] == "step" else mark["mark"]}
        for mark in marks
        if mark["time"] > killed
    ]
    new = {mark["pid"] for mark in after if mark["mark"] == "imported"}
    seconds, last = {}, killed
    for part, name in PARTS.items():
        first_times: dict[int, float] = {}
        for mark in after:
            if mark["mark"] == name and mark["pid"] in new:
                first_times.setdefault(mark["pid"], mark["time"])
        assert len(first_times) == WORLD, f"{name}: {len(first_times)} ranks"
        # a rank that need not wait for the others may be ahead of them
        now = max(last, *first_times.values())
        seconds[part], last = now - last, now
    return seconds


def clone(commit: str, folder: Path) -> Path:
    """The program as of `commit`, in a new folder; or `commit`, if it is a folder itself."""
    if Path(commit).is_dir():
        return Path(commit).absolute()
    for command in (
        ["git", "clone", "-q", "--no-checkout", str(ROOT), str(folder)],
        ["git", "-C", str(folder), "checkout", "-q", commit],
    ):
        subprocess.run(command, check=True)
    return folder


def summarise(rounds: list[dict[str, dict[str, float]]], base: str) -> dict[str, Any]:
    """The medians over rounds of way → part → seconds, and the quotients within rounds."""
    table = {
        way: {part: statistics.median(each[way][part] for each in rounds) for part in PARTS}
        for way in rounds[0]
    }
    totals = {way: [sum(each[way].values()) for each in rounds] for way in rounds[0]}
    quotients = {
        way: [before / now for before, now in zip(totals["before"], totals[way], strict=True)]
        for way in ("torchrun", "after")
    }
    return {
        **about(),
        "processes": WORLD,
        "base": base,
        "rounds": len(rounds),
        "median_seconds_by_part": table,
        "median_total_seconds": {way: statistics.median(found) for way, found in totals.items()},
        "before_over": {
            way: {"median": statistics.median(found), "min": min(found), "max": max(found)}
            for way, found in quotients.items()
        },
    }


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", default=BASE, metavar="COMMIT_OR_FOLDER")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/restart.json")
    options = parser.parse_args()
    if not (ROOT / "prepared/laptop").exists():
        sys.exit("the data is missing: run `make data` first")
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways = {
            "before": (TORCHRUN, clone(options.base, folder / "base")),
            "torchrun": (TORCHRUN, ROOT),
            "after": (OURS, ROOT),
        }
        for number in range(options.rounds):
            order = list(ways) if number % 2 == 0 else list(reversed(ways))
            rounds.append({way: restart(*ways[way], folder / f"{number}-{way}") for way in order})
            print({way: round(sum(parts.values()), 2) for way, parts in rounds[-1].items()})
    results = summarise(rounds, options.base)
    table, totals = results["median_seconds_by_part"], results["median_total_seconds"]
    print(f"{'seconds':<12}" + "".join(f"{way:>10}" for way in ways))
    for part in PARTS:
        print(f"{part:<12}" + "".join(f"{table[way][part]:>10.2f}" for way in ways))
    print(f"{'in all':<12}" + "".join(f"{totals[way]:>10.2f}" for way in ways))
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
