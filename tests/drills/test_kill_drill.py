"""Runs survive ranks that are killed in any phase: in a step, in an evaluation, while the state to
be saved is copied, while a thread writes it, between any two operations of an update, whose states
may be on a disk, and, on rank 0, between any two operations of a commit and between any two files
of a deletion.

A killed run is compared with one that was not: losses, gradient norms and the last weights and
moments are bitwise the same; at every start all checkpoints are intact, and no committed one is
missing except the oldest, which are deleted as configured; the ledger adds up to the wall clock.
"""

import contextlib
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from parallel.disk import DiskMemory
from runtime.checkpoint import save
from runtime.checkpoint.folder import complete_checkpoints, step_of
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.manifest import Damaged
from runtime.checkpoint.save import Saver
from runtime.checkpoint.verify import verify_checkpoint
from runtime.log.events import read_events
from runtime.log.ledger import Account
from tests import ROOT, runs
from tests.data_samples import flip_a_bit
from tests.drills import ON_THIS_MACHINE
from tests.planted import planted
from training import update
from training.optimizers import ShardedOptimizer
from training.step import TrainStep
from training.update import Update

PLAN = Path(os.environ.get("DRILL_PLAN", ""))  # of the ranks: which start is killed where
WHERE: dict[str, tuple[type, str]] = {  # phase → the method whose call begins it
    "step": (TrainStep, "__call__"),
    "evaluation": (TrainStep, "evaluate"),
    "update": (Update, "step"),
    "staging": (Saver, "_copy"),
    "writing": (Saver, "_write_partial"),
    "commit": (Saver, "_commit"),
    "deletion": (Saver, "_commit"),
}
OPERATIONS: dict[str, Sequence[tuple[Any, str]]] = {
    "commit": ((save, "write_manifest"), (save, "sync"), (Lease, "name_latest"), (os, "replace")),
    "deletion": ((os, "unlink"),),
    "update": ((DiskMemory, "read"), (ShardedOptimizer, "step"), (DiskMemory, "write")),
}


@dataclass(frozen=True)
class Kill:
    """`rank` kills itself the `nth` time (from 1) that it is in `phase`: `when` seconds after its
    beginning; or, in one of OPERATIONS, before operation number `when` (after the last one if there
    are fewer)."""

    rank: int
    phase: str
    nth: int
    when: float


def die(kill: Kill) -> None:
    with open(PLAN.with_name("died"), "a", encoding="utf-8") as file:
        file.write(f"{kill.phase}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def killed(kill: Kill) -> Any:
    """Within this context, the rank kills itself as planned by `kill`."""
    calls = itertools.count(1)

    @planted(*WHERE[kill.phase])
    def entered(method: Any, *arguments: Any, **options: Any) -> Any:
        with dying(kill) if next(calls) == kill.nth else contextlib.nullcontext():
            return method(*arguments, **options)

    return entered()


@contextlib.contextmanager
def dying(kill: Kill) -> Iterator[None]:
    """Within this context, which is the phase of `kill`, the rank kills itself at its moment."""
    if kill.phase not in OPERATIONS:
        timer = threading.Timer(kill.when, die, [kill])
        timer.daemon = True
        timer.start()
        yield
        return
    left = itertools.count(int(kill.when), -1)

    def counted(operation: Any, *arguments: Any, **options: Any) -> Any:
        if next(left) == 0:
            die(kill)
        return operation(*arguments, **options)

    with contextlib.ExitStack() as patches:
        for place in OPERATIONS[kill.phase]:
            patches.enter_context(planted(*place)(counted)())
        yield
    if next(left) < int(kill.when):  # there were fewer operations; without any, it lives on
        die(kill)


def check_folder(run: Path) -> list[str]:
    """What is wrong with the checkpoints in the run folder before a start."""
    found, wrong = complete_checkpoints(run / "checkpoints"), []
    for path in found:
        try:
            verify_checkpoint(path)
        except Damaged as damaged:
            wrong.append(f"{path.name}: {damaged}")
    events = read_events(run)
    saves = (each for each in events if each["event"] == "checkpoint" and "failed" not in each)
    saved = {event["step"] for event in saves}
    if saved:
        if not found or step_of(found[-1]) < max(saved):
            wrong.append(f"step {max(saved)} was committed, but is lost")
        kept = yaml.safe_load((run / "config.yaml").read_text())["checkpoint"]["keep_last"]
        if len(found) < min(kept, len(saved)):
            wrong.append(f"{len(found)} of {len(saved)} are left, but {kept} should be kept")
    return wrong


def rank_main(arguments: list[str]) -> None:
    """A rank of a launcher: run train.py with this start's kill, if it is for this rank."""
    kills = [Kill(**kill) for kill in json.loads(PLAN.read_text())]
    start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    run = Path(yaml.safe_load(Path(arguments[0]).read_text())["run"]["dir"])
    if rank == 0:
        program = sys.modules.get("tools.torchrun.program")
        is_forked = hasattr(program, "train")  # inherited from the server, which has imported it
        with open(PLAN.with_name("starts.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps([check_folder(run), is_forked]) + "\n")
    sys.argv = ["train.py", *arguments]
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(update, "GROUP_BYTES", 8_000))  # so that there are groups
        if start < len(kills) and kills[start].rank == rank:
            stack.enter_context(killed(kills[start]))
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def configured(
    folder: Path, data: Path, steps: int, offload: str = "none", **optimizer: Any
) -> str:
    """A run that evaluates and saves often."""
    folder.mkdir()
    there = {"offload_dir": str(folder)} if offload == "disk" else {}
    parallel = runs.LAYOUT_3D | {"offload": offload, **there}
    return runs.write_config(
        folder, data, parallel=parallel, checkpoint={"interval": 2, "keep_last": 2},
        train={"steps": steps, "eval_interval": 3, "eval_samples": 8}, run={"log_interval": 1},
        optimizer=optimizer,
    )  # fmt: skip


def assert_same_end(drilled: Path, alone: Path) -> None:
    """The same numbers of all steps, and the bits of the last weights and moments."""
    ours, theirs = (
        [(line["step"], line["loss"], line["grad_norm"]) for line in runs.metrics_of(folder)]
        for folder in (drilled, alone)
    )
    assert ours == theirs
    last = [complete_checkpoints(folder / "run" / "checkpoints")[-1] for folder in (drilled, alone)]
    assert runs.same_tensors(*map(runs.stored_tensors, last))


KILLS = [
    Kill(1, "evaluation", 1, 0.0),
    Kill(2, "writing", 1, 0.0),
    Kill(3, "staging", 2, 0.0),
    Kill(0, "commit", 2, 3),
    Kill(3, "step", 2, 0.0),
    Kill(0, "deletion", 1, 3),
    Kill(1, "update", 2, 0),
]
assert {kill.phase for kill in KILLS} == {*WHERE}, "one in each phase"
# the same again and again, at other moments
FIFTY = [
    replace(kill, when=n if kill.phase in OPERATIONS else n / 180)
    for n in range(9)
    for kill in KILLS
][:50]
# with states on a disk: before each operation of an update that has about five groups
TWENTY = [Kill(n % 4, "update", 1 + n % 3, n) for n in range(20)]

# logits are limited in every step
MUON = {"name": "muon", "muon": {"qk_clip": 0.05}}


def test_the_checks_can_fail(saved, tmp_path):
    _, checkpoints = runs.copy_of(saved, tmp_path)
    run = tmp_path / "run"
    assert check_folder(run) == []
    flip_a_bit(next((checkpoints / "step-00000004").glob("*.safetensors")))
    assert "step-00000004" in check_folder(run)[0]
    (checkpoints / "step-00000006").rename(tmp_path / "gone")
    assert any("step 6 was committed, but is lost" in wrong for wrong in check_folder(run))
    assert any("2 of 3 are left, but 3 should be kept" in wrong for wrong in check_folder(run))
    with pytest.raises(AssertionError):
        assert_same_end(tmp_path, saved)


@pytest.mark.parametrize(
    ("launcher", "kills", "steps", "offload", "optimizer"),
    [
        pytest.param("tools.torchrun", KILLS, 16, "none", {}, marks=pytest.mark.thorough),
        pytest.param("torch.distributed.run", KILLS[:2], 8, "none", {}, marks=pytest.mark.thorough),
        # each takes eight minutes on two quiet cores, or twice as long
        pytest.param("torch.distributed.run", FIFTY, 200, "none", {}, marks=pytest.mark.slow),
        pytest.param("tools.torchrun", FIFTY, 200, "none", MUON, marks=pytest.mark.slow),
        pytest.param("tools.torchrun", TWENTY, 60, "disk", {}, marks=pytest.mark.slow),
    ],
    ids=["in each phase", "twice", "fifty times", "muon", "on a disk"],
)
def test_a_launcher_restarts_by_itself(
    ranks, data, tmp_path, launcher, kills, steps, offload, optimizer
):
    """`torchrun --max-restarts` restarts the run without intervention, and it ends exactly as an
    undisturbed run. `tools.torchrun`, too, whose ranks are forked from a process that has imported
    the program once."""
    alone = configured(tmp_path / "alone", data, steps, **optimizer)
    assert ranks.run(runs.train_run, 4, [alone]) == [""] * 4
    folder = tmp_path / "drilled"
    config, began = configured(folder, data, steps, offload, **optimizer), time.time()
    (folder / "plan.json").write_text(json.dumps([asdict(kill) for kill in kills]))
    command = [sys.executable, "-m", launcher, "--standalone", "--local-addr", "localhost",
               "--nproc-per-node=4", f"--max-restarts={len(kills) + 3}", __file__,
               config]  # fmt: skip
    about = {"DRILL_PLAN": str(folder / "plan.json"), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = os.environ | ON_THIS_MACHINE | about
    with open(folder / "log.txt", "wb") as out:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    took = time.time() - began
    assert done.returncode == 0, (folder / "log.txt").read_text()[-4000:]
    starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    assert starts == [[[], launcher == "tools.torchrun"]] * (len(kills) + 1)
    assert (folder / "died").read_text().split() == [kill.phase for kill in kills]
    assert_same_end(folder, tmp_path / "alone")
    # The ledger adds up, but for what it takes to write the last lines.
    events = read_events(folder / "run")
    seconds = Account(events).seconds
    causes = ("steps", "lost", "evaluation", "saving", "start", "end", "down")
    assert min(seconds[cause] for cause in causes) > 0
    first, last = (next(e for e in events if e["event"] == "start")["began"], events[-1]["time"])
    assert sum(seconds.values()) == pytest.approx(last - first, abs=0.5)
    assert last - first <= took


if __name__ == "__main__":
    rank_main(sys.argv[1:])
