"""Which steps are saved, the marks of a start, and the server from which tools.torchrun forks."""

import importlib
import itertools
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

from runtime.checkpoint import save_interval
from runtime.checkpoint.save_interval import MOST_SECONDS, SaveInterval, mtbf_of
from runtime.listener import Run
from runtime.log.events import read_events
from runtime.start import timing
from runtime.start.timing import StartTimes
from settings.data_stages import data_stages
from settings.load import load_config
from tests import runs
from tools import export

OFTEN = mtbf_of(1.0, 1) / 400.0  # failures per day of a GPU: one in 400 s
HOUR = int(MOST_SECONDS)


def test_the_first_save_does_not_count():
    """It allocates memory, so it takes longer. A save in the background is known only at the next
    one, so at the second save the newest that is known is the first."""
    config = load_config("configs/laptop.yaml", ["checkpoint.interval=auto"])
    interval, of = SaveInterval(config, 0, 0), Mock(**{"watchdog.measured": []})
    saves = (2, 9.0, {}), (4, 0.5, {"step": 2, "stall_seconds": 9.0, "write_seconds": 30.0})
    for of.step, waited, last in saves:
        interval.saved(of, waited, last)
    assert ([*interval.waits], interval.write) == ([0.5], 0.0)
    of.step, last = 6, {"step": 4, "stall_seconds": 0.5, "write_seconds": 1.0}
    interval.saved(of, 0.25, last)
    assert ([*interval.waits], interval.write) == ([0.5, 0.5], 1.0)


# With saves of 0.5 s and a failure in 400 s, √(2sM) is 20 steps of a second. Before it is measured,
# a save is estimated to cost nothing here, so it is measured soon. The first is after the first
# step, because a run that logs rarely would wait long for its second line.
@pytest.mark.parametrize(
    ("steps", "interval", "rate", "waits", "writes", "seconds", "expected"),
    [
        (100, "auto", OFTEN, 0.5, 0.0, 1.0, [1, 2, 22, 42, 62, 82, 100]),
        (100, "auto", OFTEN / 4, 0.5, 0.0, 1.0, [1, 2, 42, 82, 100]),  # a rarer failure
        (130, "auto", OFTEN, 0.5, 30.0, 1.0, [1, 2, 62, 122, 130]),  # slow to write
        (4, "auto", OFTEN, 0.5, 0.0, 1000.0, [1, 2, 3, 4]),  # not less than a step
        (HOUR + 2, "auto", 0.0, 0.0, 0.0, 1.0, [HOUR, HOUR + 2]),  # nothing fails
        (10, "never", OFTEN, 0.5, 0.0, 1.0, []),
        (10, "0", OFTEN, 0.5, 0.0, 1.0, [10]),  # after the last step only
        (10, "4", OFTEN, 0.5, 0.0, 1.0, [4, 8, 10]),
    ],
)
def test_which_steps_are_saved(tmp_path, steps, interval, rate, waits, writes, seconds, expected):
    """With `auto`, at Young's interval, within bounds. Each save makes training wait for `waits`
    seconds and writes for `writes`; a step takes `seconds`."""
    overrides = [f"run.dir={tmp_path}", f"train.steps={steps}", f"checkpoint.interval={interval}"]
    overrides += [f"checkpoint.failures_per_gpu_day={rate}"]
    config = load_config("configs/laptop.yaml", overrides)
    measured = SimpleNamespace(measured=[seconds] * 2)  # of steps that were rolled back
    train = SimpleNamespace(mesh=SimpleNamespace(device="cpu"))
    start = SimpleNamespace(step=0, state=SimpleNamespace(tokens=0))
    log, stage = runs.run_log_of(tmp_path), data_stages(config)[0]
    of, due = Run(stage, train, None, start, log, measured, None), SaveInterval(config, 0, 0)
    found, of.step_seconds = [], seconds
    with (
        patch.object(save_interval, "from_rank_0", lambda action, device: action()),
        patch.object(save_interval.dist, "get_world_size", lambda: 1),
    ):
        for of.step in range(1, steps + 1):
            measured.measured.append(seconds)
            if due.is_due(of):
                found.append(of.step)
                due.saved(of, waits, {"write_seconds": writes})
    assert found == expected
    decided = runs.events_of(tmp_path, "interval")
    assert bool(decided) == (interval == "auto")
    assert all((event["mtbf"] is None) == (rate == 0) for event in decided), "JSON has no infinity"


def test_by_default_a_run_can_be_exported(ranks, data, tmp_path):
    """It saves after its last step."""
    config = Path(runs.write_config(tmp_path, data, train={"steps": 1, "micro_batch_size": 8}))
    text = config.read_text()
    config.write_text(text.replace("checkpoint:\n  interval: never\n", "checkpoint: {}\n"))
    ((refusal, said),) = ranks.run(runs.heard, 1, [str(config)], "stdout")
    assert (refusal, "finished after 1 steps; run folder" in said) == ("", True)
    arguments = ["--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    assert export.main(arguments) == 0


@pytest.mark.thorough
def test_all_ranks_save_the_same_steps_and_train_the_same(ranks, data, tmp_path):
    """Where no failure is expected, only keep_every's and the last."""
    folders = tmp_path / "often", tmp_path / "rarely"
    options = {"failures_per_gpu_day": 1e5, "keep_last": 20}, {"keep_every": 3}
    for folder, more in zip(folders, options, strict=True):
        folder.mkdir()
        saves = {"interval": "auto", "failures_per_gpu_day": 0.0, **more}
        layout = runs.LAYOUT_3D
        runs.run(ranks, 4, runs.write_config(folder, data, parallel=layout, checkpoint=saves))
    often, rarely = map(runs.saved_steps, folders)
    assert (often[-1], len(often) > 2, rarely) == (6, True, [3, 6])
    assert runs.losses(folders[0]) == runs.losses(folders[1])
    (started,) = runs.events_of(folders[0] / "run", "started")
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
