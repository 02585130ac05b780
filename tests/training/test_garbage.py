"""Python's garbage is collected by all ranks in the same step, and by none within a step."""

import gc
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from proofs.ranks import Ranks
from runtime.garbage import GarbageCollection
from tests.planted import planted
from tests.runs import train_run, write_config
from training.step import TrainStep

STEPS, INTERVAL = 4, 2
LITTER = 2000  # cycles that rank 1 makes in a step, and rank 0 does not


def collections(arguments: list[str], automatic: bool) -> list[tuple[int, bool, int]]:
    """Train, and return for each collection of the run the number of steps begun before it, whether
    one was under way, and the number of objects that it freed.

    automatic: a control, in which the run leaves automatic collection on.
    """
    in_step, begun = False, 0
    found = []

    @planted(TrainStep, "__call__")
    def littering(step: Any, *batch: Any) -> Any:
        nonlocal in_step, begun
        begun, in_step = begun + 1, True
        for _ in range(LITTER * dist.get_rank()):
            cycle: list[Any] = []
            cycle.append(cycle)
        result = step(*batch)
        in_step = False
        return result

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            found.append((begun, in_step, info["collected"]))

    @planted(GarbageCollection, "begins")
    def begins(begin: Any, *about: Any) -> None:
        if not automatic:
            begin(*about)
        gc.callbacks.append(note)

    @planted(GarbageCollection, "closes")
    def closes(close: Any, *about: Any) -> None:
        gc.callbacks.remove(note)
        close(*about)

    with littering(), begins(), closes():
        assert train_run(arguments) == ""
    assert gc.isenabled(), "as before the run"
    return found


def test_all_ranks_collect_in_the_same_step(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """After every second step, whatever they have created; and the step, the pipeline and the
    loader leave no cycles behind (test_left.py tries other layouts). Control: otherwise one rank
    collects much more often."""
    run, train = {"gc_interval": INTERVAL}, {"steps": STEPS}
    config = write_config(tmp_path, data, parallel={"pp": 2}, train=train, run=run)
    due = range(INTERVAL, STEPS + 1, INTERVAL)
    assert ranks.run(collections, 2, [config], False) == [
        [(step, False, LITTER * INTERVAL * rank) for step in due] for rank in (0, 1)
    ]
    control = [config, f"run.dir={tmp_path / 'control'}"]
    within = [
        sum(in_step for _, in_step, _ in found)
        for found in ranks.run(collections, 2, control, True)
    ]
    assert within[1] > within[0] + STEPS


@pytest.mark.parametrize("already", [False, True])
def test_everything_is_as_before_afterwards(already: bool) -> None:
    """What existed is frozen during a run, unless the launcher has frozen it already."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    if already:
        gc.freeze()
    try:
        with patch.object(gc, "collect"):  # which takes a second here
            garbage = GarbageCollection()
            garbage.begins(Mock())
            assert not gc.isenabled()
            assert gc.get_freeze_count() > 1000
            garbage.closes(Mock(), None)
            assert gc.isenabled()
            assert bool(gc.get_freeze_count()) == already
    finally:
        gc.enable()
        (gc.freeze if frozen else gc.unfreeze)()
