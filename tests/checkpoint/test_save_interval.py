"""Which steps are saved, the marks of a start, and the server from which tools.torchrun forks."""

import importlib
import itertools
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from runtime.checkpoint import save_interval
from runtime.checkpoint.save_interval import MOST_SECONDS, SaveInterval, mtbf_of
from runtime.checkpoint.saving import Saving
from runtime.listener import Run
from runtime.log.events import read_events
from runtime.start import timing
from runtime.start.timing import StartTimes
from settings.data_stages import data_stages
from settings.load import load_config
from tests import runs
from tools import export

OFTEN = mtbf_of(1.0, 4) / 400.0  # failures per day of a GPU: on four, one in 400 s
HOUR = int(MOST_SECONDS)


# With saves of 0.5 s and a failure in 400 s, √(2sM) is 20 steps of a second. Before it is measured,
# a save is estimated to cost nothing here, so it is measured soon. The first is after the first
# step, because a run that logs rarely would wait long for its second line.
@pytest.mark.parametrize(
    ("steps", "interval", "about", "expected"),
    [
        (100, "auto", {}, [1, 2, 22, 42, 62, 82, 100]),
        (100, "auto", {"rate": OFTEN / 4}, [1, 2, 42, 82, 100]),  # a rarer failure
        # the device's longer wait counts, once it is known: the medians are 0.125, 0.3125 and 0.5 s
        (100, "auto", {"host": 0.125}, [1, 2, 12, 28, 48, 68, 88, 100]),
        (160, "auto", {"write": 30.0}, [1, 2, 22, 82, 142, 160]),  # slow to write: twice that
        (4, "auto", {"step": 1000.0}, [1, 2, 3, 4]),
        (HOUR + 2, "auto", {"rate": 0.0}, [HOUR, HOUR + 2]),  # nothing fails
        (7, "auto", {"rate": 0.0, "keep": 3}, [3, 6, 7]),
        (4, "auto", {"step": None, "keep": 2}, [2, 4]),  # no step has been logged
        (10, "never", {}, []),
        (10, "0", {}, [10]),  # after the last step only
        (10, "4", {}, [4, 8, 10]),
    ],
    ids=str,
)
def test_which_steps_are_saved(tmp_path, steps, interval, about, expected):
    """With `auto`, at Young's interval, within bounds. The first save does not count: it allocates
    memory, so it takes longer. The cost of a save in the background is known at the next."""
    # failures, keep_every; seconds: a save on the host and the device, its write, a step
    usual = {"rate": OFTEN, "keep": 0, "host": 0.5, "device": 0.5, "write": 0.0, "step": 1.0}
    given = usual | about
    overrides = [f"run.dir={tmp_path}", f"train.steps={steps}", f"checkpoint.interval={interval}"]
    overrides += [f"checkpoint.failures_per_gpu_day={given['rate']}"]
    overrides += [f"checkpoint.keep_every={given['keep']}"]
    config = load_config("configs/laptop.yaml", overrides)
    logged = [given["step"]] if given["step"] else []
    watchdog = SimpleNamespace(measured=logged * 2)  # of steps that were rolled back
    train = SimpleNamespace(mesh=SimpleNamespace(device="cpu"))
    start = SimpleNamespace(step=0, state=SimpleNamespace(tokens=0))
    log, stage = runs.run_log_of(tmp_path), data_stages(config)[0]
    of = Run(stage, train, None, start, log, watchdog, None)
    of.step_seconds = given["step"]
    due = SaveInterval(config, 0, 0)
    found, last = [], {}
    with (
        patch.object(save_interval, "from_rank_0", lambda action: action()),
        patch.object(save_interval.dist, "get_world_size", lambda: 4),
    ):
        for of.step in range(1, steps + 1):
            watchdog.measured += logged
            if due.is_due(of):
                factor = 1 if found else 100  # the first save
                due.saved(of, factor * given["host"], last)
                last = {"step": of.step, "stall_seconds": factor * given["device"]}
                last["write_seconds"] = factor * given["write"]
                found.append(of.step)
    assert found == expected
    decided = runs.events_of(tmp_path, "interval")
    assert bool(decided) == (interval == "auto" and logged != [])
    assert all((each["mtbf"] is None) == (given["rate"] == 0) for each in decided), (
        "JSON has no Infinity"
    )


def test_after_a_rollback_the_interval_counts_from_its_checkpoint():
    saving = Saving(None, [], None, None)
    saving.interval = SaveInterval(load_config("configs/laptop.yaml", []), 9, 0)
    saving.went_back(None, SimpleNamespace(step=4))
    assert saving.interval.saved_at == 4


def test_by_default_a_run_can_be_exported(ranks, data, tmp_path):
    """It saves after its last step."""
    config = Path(runs.write_config(tmp_path, data, train={"steps": 1, "micro_batch_size": 8}))
    text = config.read_text()
    config.write_text(text.replace("checkpoint:\n  interval: never\n", "checkpoint: {}\n"))
    ((refusal, said),) = ranks.run(runs.heard, 1, [str(config)], "stdout")
    assert (refusal, "finished after 1 steps; run folder" in said) == ("", True)
    ((refusal, said),) = ranks.run(runs.heard, 1, [str(config)], "stdout")
    assert (refusal, "after 1 steps; none was left: to go on, raise train" in said) == ("", True)
    arguments = ["--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    assert export.main(arguments) == 0


@pytest.mark.thorough
def test_all_ranks_save_the_same_steps_and_train_the_same(ranks, data, saved, tmp_path):
    """They train the same as a run that saves after other steps."""
    saves = {"interval": "auto", "failures_per_gpu_day": 1e5, "keep_last": 20}
    config = runs.write_config(tmp_path, data, parallel=runs.LAYOUT_3D, checkpoint=saves)
    runs.run(ranks, 8, config)
    often = runs.saved_steps(tmp_path)
    assert (often[-1], len(often) > 2, often != runs.saved_steps(saved)) == (6, True, True)
    assert runs.losses(tmp_path) == runs.losses(saved)
    (started,) = runs.events_of(tmp_path / "run", "started")
    parts = {"verify", "lease", "build", "load", "listeners", "step"}
    assert parts <= started["seconds"].keys()


def test_the_parts_of_a_start_add_up(tmp_path):
    """Each part takes a second. A later stage begins where the one before ended, and a rollback to
    the first step writes no second event."""
    log, clock = runs.run_log_of(tmp_path), itertools.count(100.0)

    def stage(*before: str) -> float:
        """A start, and its stage, which repeats its first step; when that ends."""
        run: Any = SimpleNamespace(first_step=4, log=log)
        for part in before:
            timing.mark(part)
        listener = StartTimes()
        listener.begins(run)
        listener.after_step(run)
        listener.after_step(run)
        return next(clock)

    with (
        patch.object(timing, "time", SimpleNamespace(monotonic=lambda: next(clock))),
        patch.object(timing, "_ended", {}),
    ):
        log.busy_since = 90.0
        log.busy_since = stage("import", "join")
        stage("build")
    first, second = [event["seconds"] for event in read_events(tmp_path)]
    assert first == {"import": 10.0, "join": 1.0, "listeners": 1.0, "step": 1.0}
    assert second == {"build": 1.0, "listeners": 1.0, "step": 1.0}


def hear_a_stop() -> None:
    importlib.import_module("tools.torchrun.program")
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
    if (rank := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == -signal.SIGTERM


def test_the_fork_server_outlives_a_stop(tmp_path):
    """Else torchrun would take its ranks for dead while they save. A rank does not, before it has
    handlers of its own."""
    assert runs.status(runs.forked(tmp_path / "log", hear_a_stop)) == 0
