"""Runs survive ranks that are killed in any phase: in a step, in an evaluation, while the state to
be saved is copied, while a thread writes it, and, on rank 0, between any two operations of a commit
and between any two files of a deletion.

A killed run is compared with one that was not: losses and gradient norms of all steps are bitwise
the same, and so are the last weights and moments; at every start all checkpoints are intact, and no
committed one is missing except the oldest, which are deleted as configured; the ledger adds up to
the wall clock.
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
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from proofs.ranks import Ranks
from runtime import signals
from runtime.checkpoint import save
from runtime.checkpoint.folder import complete_checkpoints, step_of
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.manifest import Damaged
from runtime.checkpoint.save import Saver
from runtime.checkpoint.verify import verify_checkpoint
from runtime.log.events import read_events
from runtime.log.ledger import account
from tests import ROOT
from tests.planted import planted
from tests.runs import LAYOUT_3D, dies, metrics_of, train_run, write_config
from training.step import TrainStep

WHERE: dict[str, tuple[type, str]] = {  # phase → the method whose call begins it
    "step": (TrainStep, "__call__"),
    "evaluation": (TrainStep, "evaluate"),
    "staging": (Saver, "_copy"),
    "writing": (Saver, "_write_partial"),
    "commit": (Saver, "_commit"),
    "deletion": (Saver, "_commit"),
}
# of a commit
OPERATIONS = ((save, "write_manifest"), (save, "sync"), (Lease, "name_latest"), (os, "replace"))


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
        rank = 0 if alone else draw.randrange(world)
        kills.append(Kill(rank, phase, draw.randint(1, 5 if phase == "step" else 2), when))
    draw.shuffle(kills)
    return kills


# --- in a rank ------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def killed(kill: Kill) -> Iterator[None]:
    """Within this context, the rank kills itself as planned by `kill`."""
    calls = []
    special = {"commit": _dying_in_commit, "deletion": _dying_in_deletion}
    dying = special.get(kill.phase, _dying_later)

    @planted(*WHERE[kill.phase])
    def entered(method: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(None)
        with dying(kill.when) if len(calls) == kill.nth else contextlib.nullcontext():
            return method(*arguments, **options)

    with entered():
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

    with contextlib.ExitStack() as patches:
        for owner, name in OPERATIONS:
            patches.enter_context(patch.object(owner, name, counted(getattr(owner, name))))
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
    """The checkpoints in the run folder before a start, and what is wrong with them."""
    found, wrong = complete_checkpoints(run / "checkpoints"), []
    for path in found:
        try:
            verify_checkpoint(path)
        except Damaged as damaged:
            wrong.append(f"{path.name}: {damaged}")
    events = read_events(run)
    saves = (each for each in events if each["event"] == "checkpoint" and "failed" not in each)
    saved = {event["step"] for event in saves}
    if saved and (not found or step_of(found[-1]) < max(saved)):
        wrong.append(f"step {max(saved)} was committed, but is lost")
    config = yaml.safe_load((run / "config.yaml").read_text()) if events else {}
    kept = config["checkpoint"]["keep_last"] if events else 0
    if len(found) < min(kept, len(saved)):
        wrong.append(f"{len(found)} of {len(saved)} are left, but {kept} should be kept")
    return {"checkpoints": [path.name for path in found], "wrong": wrong}


def rank_main(planned: Path, arguments: list[str]) -> None:
    """A rank started by torchrun: run train.py with this start's kill, if it is for this rank."""
    kills = [Kill(**kill) for kill in json.loads(planned.read_text())]
    start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    run = Path(yaml.safe_load(Path(arguments[0]).read_text())["run"]["dir"])
    if rank == 0:
        with open(planned.with_name("starts.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps({"start": start, **check_folder(run)}) + "\n")
    sys.argv = ["train.py", *arguments]
    with contextlib.ExitStack() as stack:
        if start < len(kills) and kills[start].rank == rank:
            stack.enter_context(killed(kills[start]))
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def last_state(run: Path) -> dict[str, torch.Tensor]:
    """The tensors of the last checkpoint, by file and name."""
    newest = complete_checkpoints(run / "checkpoints")[-1]
    return {
        f"{f.name}:{name}": tensor
        for f in newest.glob("*.safetensors")
        for name, tensor in load_file(f).items()
    }


# --- on the tests' ranks --------------------------------------------------------------------------


def configured(folder: Path, data: Path, steps: int) -> str:
    """A run that evaluates and saves often."""
    folder.mkdir()
    return write_config(
        folder, data, parallel=LAYOUT_3D, checkpoint={"interval": 2, "keep_last": 2},
        train={"steps": steps, "eval_interval": 3, "eval_samples": 8}, run={"log_interval": 1},
    )  # fmt: skip


def result(folder: Path) -> tuple[list[tuple[float, ...]], list[Any]]:
    """The numbers of all steps, and the bytes of the last weights and moments."""
    lines = [(line["step"], line["loss"], line["grad_norm"]) for line in metrics_of(folder)]
    state = last_state(folder / "run")
    return lines, [(name, state[name].numpy().tobytes()) for name in sorted(state)]


def drilled(arguments: list[str], kill: Kill | None) -> str:
    # the time of this start, not that of the server from which this process was forked
    signals.STARTED = time.monotonic()
    if kill is not None and kill.rank == dist.get_rank():
        with killed(kill):
            return train_run(arguments)
    return train_run(arguments)


KILLS = {
    4: [
        Kill(1, "evaluation", 1, 0.0),
        Kill(2, "writing", 1, 0.0),
        Kill(3, "staging", 2, 0.0),
        Kill(0, "commit", 2, 2),
        Kill(3, "step", 2, 0.0),
        Kill(0, "deletion", 1, 3),
    ],
    8: [
        Kill(6, "step", 4, 0.0),
        Kill(0, "commit", 1, 1),
        Kill(0, "commit", 1, 5),
        Kill(0, "deletion", 1, 3),
    ],
}


@pytest.mark.parametrize(
    "world", [pytest.param(4, marks=pytest.mark.thorough), pytest.param(8, marks=pytest.mark.slow)]
)
def test_killed_again_and_again(ranks: Ranks, data: Path, tmp_path: Path, world: int) -> None:
    """A run killed several times, in all phases, has the same losses and final state as an
    undisturbed one; every checkpoint is good, and the seconds in the ledger add up. On 8 ranks with
    the 3D layout too."""
    alone, folder = tmp_path / "alone", tmp_path / "drilled"
    assert ranks.run(drilled, world, [configured(alone, data, 10)], None) == [""] * world
    config, began = configured(folder, data, 10), time.time()
    for kill in KILLS[world]:
        with dies(f"rank {kill.rank}: died with exit code -9"):
            ranks.run(drilled, world, [config], kill)
        assert check_folder(folder / "run")["wrong"] == []
    assert ranks.run(drilled, world, [config], None) == [""] * world
    took = time.time() - began
    assert result(folder) == result(alone)
    events = read_events(folder / "run")
    seconds = account(events)
    causes = ("steps", "lost", "evaluation", "saving", "start", "end", "down")
    assert min(seconds[cause] for cause in causes) > 0
    first, last = (next(e for e in events if e["event"] == "start")["began"], events[-1]["time"])
    assert sum(seconds.values()) == pytest.approx(last - first, abs=0.5)
    assert last - first <= took


@pytest.mark.thorough
def test_the_checks_can_fail(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, data, checkpoint={"interval": 2, "keep_last": 3})
    assert ranks.run(train_run, 1, [config]) == [""]
    run = tmp_path / "run"
    assert check_folder(run)["wrong"] == []
    file = next((run / "checkpoints" / "step-00000004").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert "step-00000004" in check_folder(run)["wrong"][0]
    (run / "checkpoints" / "step-00000006").rename(tmp_path / "gone")
    assert any("step 6 was committed, but is lost" in wrong for wrong in check_folder(run)["wrong"])


def test_a_plan_has_every_phase(tmp_path: Path) -> None:
    assert {kill.phase for kill in KILLS[4]} == set(WHERE)
    kills = plan(0, 48, 4)
    assert {phase: sum(kill.phase == phase for kill in kills) for phase in WHERE} == dict.fromkeys(
        WHERE, 8
    )
    assert kills == plan(0, 48, 4) != plan(1, 48, 4)


# --- under torchrun -------------------------------------------------------------------------------


def run_under_torchrun(config: str, world: int, kills: list[Kill]) -> float:
    """Make a run with these kills; return the wall-clock seconds of the whole command."""
    planned = Path(config).with_name("plan.json")
    planned.write_text(json.dumps([asdict(kill) for kill in kills]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr",
               "localhost", f"--nproc-per-node={world}", f"--max-restarts={len(kills) + 3}",
               "-m", "tests.drills.test_kill_drill", config]  # fmt: skip
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    drill = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "DRILL_PLAN": str(planned)}
    began = time.time()
    with open(planned.with_name("log.txt"), "wb") as log:
        done = subprocess.run(command, cwd=ROOT, env=os.environ | drill, stdout=log, stderr=log)
    assert done.returncode == 0, planned.with_name("log.txt").read_text()[-4000:]
    return time.time() - began


@pytest.mark.parametrize(
    ("kills", "steps"),
    [
        pytest.param([Kill(2, "step", 4, 0.0)], 6, marks=pytest.mark.thorough),
        pytest.param(plan(0, 50, 4), 300, marks=pytest.mark.slow),  # eight minutes
    ],
    ids=["once", "fifty times"],
)
def test_torchrun_restarts_by_itself(
    ranks: Ranks, data: Path, tmp_path: Path, kills: list[Kill], steps: int
) -> None:
    """`torchrun --max-restarts` restarts the run without intervention, and it ends exactly as an
    undisturbed run."""
    assert ranks.run(train_run, 4, [configured(tmp_path / "alone", data, steps)]) == [""] * 4
    seconds = run_under_torchrun(configured(tmp_path / "drilled", data, steps), 4, kills)
    lines = (tmp_path / "drilled" / "starts.jsonl").read_text().splitlines()
    starts = [json.loads(line) for line in lines]
    assert len(starts) == len(kills) + 1
    assert [start["wrong"] for start in starts] == [[]] * len(starts)
    assert result(tmp_path / "drilled") == result(tmp_path / "alone")
    # The ledger does not include torchrun's time before the first process starts and after the last
    # one has ended.
    told = sum(account(read_events(tmp_path / "drilled" / "run")).values())
    assert 0 <= seconds - told < 0.1 * seconds + 30


if __name__ == "__main__":
    rank_main(Path(os.environ["DRILL_PLAN"]), sys.argv[1:])
