"""Kills one run fifty times: `python -m benchmarks.kill_drill`

A small run is started by `torchrun --max-restarts`. In each start, a random rank kills itself with
SIGKILL at a random moment: in a step, in an evaluation, while it copies the state to be saved,
while its thread writes, and, on rank 0, between any two operations of a commit and between any two
files of a deletion. After the last kill the run is left to finish. The same run is also made
without kills, and

- losses and gradient norms of all steps must be bitwise the same, and so must the last weights and
  moments;
- at every start all checkpoints must be intact, and no committed one may be missing except the
  oldest, which are deleted as configured;
- the ledger must add up to the wall clock.
"""

import contextlib
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from safetensors.torch import load_file

import runtime.checkpoints.save
from benchmarks.about import about
from runtime.checkpoints.manifest import Damaged, verify
from runtime.checkpoints.names import complete_checkpoints, step_of
from runtime.checkpoints.save import Saver
from runtime.records.events import read_events
from runtime.records.ledger import CAUSES, account
from tools.command import CommandParser, run_command
from training.step import TrainStep

ROOT = Path(__file__).parent.parent
WHERE: dict[str, tuple[type, str]] = {  # phase → the method whose call begins it
    "step": (TrainStep, "__call__"),
    "evaluation": (TrainStep, "evaluate"),
    "staging": (Saver, "_copy"),
    "writing": (Saver, "_write_partial"),
    "commit": (Saver, "_commit"),
    "deletion": (Saver, "_commit"),
}
OPERATIONS = ("write_manifest", "sync_folder", "name_latest")  # of a commit, besides os.replace
LAYOUTS = {4: {"tp": 2, "pp": 2, "dp_shard": 1}, 8: {"tp": 2, "pp": 2, "dp_shard": 2}}


@dataclass(frozen=True)
class Kill:
    """`rank` kills itself the `nth` time (from 1) that it is in `phase`: `when` seconds after its
    beginning; or, in a commit or a deletion, before operation or file number `when` (after the last
    one if there are fewer)."""

    rank: int
    phase: str
    nth: int
    when: float


def plan(seed: int, count: int, world: int) -> list[Kill]:
    """`count` kills in random order, equally many in each phase."""
    draw = random.Random(seed)
    kills = []
    for number in range(count):
        phase = list(WHERE)[number % len(WHERE)]
        alone = phase in ("commit", "deletion")  # only rank 0 does these
        when = draw.randrange(8) if alone else draw.uniform(0, 0.05)
        kills.append(
            Kill(
                0 if alone else draw.randrange(world),
                phase,
                draw.randint(1, 5 if phase == "step" else 2),
                when,
            )
        )
    draw.shuffle(kills)
    return kills


# --- in a rank ------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def planted(kill: Kill) -> Iterator[None]:
    """Within this context, the rank kills itself as planned by `kill`."""
    owner, name = WHERE[kill.phase]
    honest, calls = getattr(owner, name), []
    dying = {"commit": _dying_in_commit, "deletion": _dying_in_deletion}.get(
        kill.phase, _dying_later
    )

    def entered(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        with dying(kill.when) if len(calls) == kill.nth else contextlib.nullcontext():
            return honest(*arguments, **options)

    with patch.object(owner, name, entered):
        yield


@contextlib.contextmanager
def _dying_later(when: float) -> Iterator[None]:
    timer = threading.Timer(when, die)
    timer.daemon = True
    timer.start()
    yield


@contextlib.contextmanager
def _dying_in_commit(when: float) -> Iterator[None]:
    left = [int(when)]

    def counted(operation: Callable) -> Callable:
        def called(*arguments: Any) -> Any:
            if not left[0]:
                die()
            left[0] -= 1
            return operation(*arguments)

        return called

    with contextlib.ExitStack() as stack:
        for name in OPERATIONS:
            stack.enter_context(
                patch.object(
                    runtime.checkpoints.save, name, counted(getattr(runtime.checkpoints.save, name))
                )
            )
        stack.enter_context(patch.object(os, "replace", counted(os.replace)))
        yield
    die()  # there were fewer operations


@contextlib.contextmanager
def _dying_in_deletion(when: float) -> Iterator[None]:
    def partly(folder: Path, **options: Any) -> None:
        for file in sorted(folder.iterdir())[: int(when)]:
            file.unlink()
        die()

    with patch.object(shutil, "rmtree", partly):
        yield
    die()  # there was nothing to delete


def check_folder(run: Path) -> dict[str, Any]:
    """Checks the run folder before a start: its checkpoints, and what is wrong with them."""
    found = complete_checkpoints(run / "checkpoints")
    wrong = []
    for path in found:
        try:
            verify(path)
        except Damaged as damaged:
            wrong.append(f"{path.name}: {damaged}")
    events = read_events(run) if (run / "events.jsonl").exists() else []
    saved = [
        event["step"]
        for event in events
        if event["event"] == "checkpoint" and "failed" not in event
    ]
    if saved and (not found or step_of(found[-1]) < max(saved)):
        wrong.append(f"step {max(saved)} was committed, but is lost")
    kept = (
        yaml.safe_load((run / "config.yaml").read_text())["checkpoint"]["keep_last"]
        if events
        else 0
    )
    if len(found) < min(kept, len(set(saved))):
        wrong.append(f"{len(found)} of {len(set(saved))} are left, but {kept} should be kept")
    return {"checkpoints": [path.name for path in found], "wrong": wrong}


def rank_main(planned: Path, arguments: list[str]) -> None:
    """A rank started by torchrun: runs train.py with this start's kill, if it is for this rank."""
    kills = [Kill(**kill) for kill in json.loads(planned.read_text())]
    start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    run = Path(yaml.safe_load(Path(arguments[0]).read_text())["run"]["dir"])
    if rank == 0:
        with open(planned.with_name("starts.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps({"start": start, **check_folder(run)}) + "\n")
    sys.argv = ["train.py", *arguments]
    with contextlib.ExitStack() as stack:
        if start < len(kills) and kills[start].rank == rank:
            stack.enter_context(planted(kills[start]))
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


# --- the drill ------------------------------------------------------------------------------------


def last_state(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of the last checkpoint, by file and name."""
    newest = complete_checkpoints(run / "checkpoints")[-1]
    return {
        f"{f.name}:{name}": tensor
        for f in newest.glob("*.safetensors")
        for name, tensor in load_file(f).items()
    }


def numbers(run: Path) -> list[tuple[int, str, str]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"].hex(), line["grad_norm"].hex()) for line in lines]


def small(base: Path, world: int, steps: int) -> dict[str, Any]:
    """The configuration of a small run with the data of `base`, which evaluates and saves often."""
    raw = yaml.safe_load(base.read_text())
    raw["model"] |= {"dim": 64, "ffn_dim": 128}
    raw["parallel"] |= LAYOUTS[world]
    raw["train"] |= {"steps": steps, "seq_len": 64, "global_batch_size": 8, "micro_batch_size": 2}
    raw["train"] |= {"eval_interval": 3, "eval_samples": 32}
    raw["checkpoint"] |= {"interval": 2}
    return raw


def run_under_torchrun(
    folder: Path, raw: dict[str, Any], world: int, kills: list[Kill]
) -> tuple[Path, float]:
    """Makes one run with these kills, possibly none; returns its folder, and the wall-clock seconds
    of the whole command."""
    folder.mkdir()
    raw["run"] = {"dir": str(folder / "run"), "log_interval": 1}
    config, planned = folder / "config.yaml", folder / "plan.json"
    config.write_text(yaml.safe_dump(raw))
    planned.write_text(json.dumps([asdict(kill) for kill in kills]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr",
               "localhost"]  # fmt: skip
    command += [
        f"--nproc-per-node={world}",
        f"--max-restarts={len(kills) + 3}",
        "-m",
        "benchmarks.kill_drill",
    ]
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
        "DRILL_PLAN": str(planned),
    }
    began = time.time()
    with open(folder / "log.txt", "wb") as log:
        done = subprocess.run(
            [*command, str(config)], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    if done.returncode:
        raise RuntimeError(
            f"{folder.name} ended with {done.returncode}:\n"
            + (folder / "log.txt").read_text()[-4000:]
        )
    return folder / "run", time.time() - began


def drill(
    folder: Path, raw: dict[str, Any], world: int, kills: list[Kill], alone: Path
) -> dict[str, Any]:
    """Makes a run with these kills, and compares it with the run without kills in `alone`."""
    run, seconds = run_under_torchrun(folder, raw, world, kills)
    starts = [json.loads(line) for line in (run.parent / "starts.jsonl").read_text().splitlines()]
    ledger = account(read_events(run))
    expected, found = last_state(alone), last_state(run)
    return {
        "kills": len(starts) - 1,
        "kills_by_phase": dict(Counter(kill.phase for kill in kills[: len(starts) - 1])),
        "steps": raw["train"]["steps"],
        "numbers_equal_bitwise": numbers(run) == numbers(alone),
        "last_state_equal_bitwise": expected.keys() == found.keys()
        and all(expected[n].equal(found[n]) for n in expected),
        "checkpoints_verified": sum(len(start["checkpoints"]) for start in starts),
        "wrong": [wrong for start in starts for wrong in start["wrong"]],
        "ledger_seconds": {cause: round(ledger[cause], 3) for cause in CAUSES},
        "ledger_sum_seconds": sum(ledger.values()),
        "wall_clock_seconds": seconds,
    }


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--world", type=int, choices=sorted(LAYOUTS), default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/kill_drill.json")
    options = parser.parse_args()
    raw = small(ROOT / "configs/laptop.yaml", options.world, options.steps)
    if not (ROOT / raw["data"]["path"]).exists():
        sys.exit("the data is missing: run `make data` first")
    with tempfile.TemporaryDirectory() as folder:
        alone, _ = run_under_torchrun(Path(folder) / "alone", raw, options.world, [])
        kills = plan(options.seed, options.kills, options.world)
        found = drill(Path(folder) / "drilled", raw, options.world, kills, alone)
    head = {**about(), "processes": options.world, "seed": options.seed}
    print(json.dumps(found, indent=1))
    # The ledger does not include torchrun's time before the first process starts and after the last
    # one has ended.
    unaccounted = found["wall_clock_seconds"] - found["ledger_sum_seconds"]
    ok = (
        found["kills"] >= options.kills
        and found["numbers_equal_bitwise"]
        and found["last_state_equal_bitwise"]
    )
    if not ok or found["wrong"] or not 0 <= unaccounted < 0.1 * found["wall_clock_seconds"] + 30:
        sys.exit("the drill failed")
    options.json.write_text(json.dumps(head | found, indent=1) + "\n")


if __name__ == "__main__":
    if "DRILL_PLAN" in os.environ:
        rank_main(Path(os.environ["DRILL_PLAN"]), sys.argv[1:])
    else:
        run_command(main)
