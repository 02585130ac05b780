"""Of each start, one end is recorded: never two, whoever else may know how it ended, and one as
long as rank 0, its launcher or its monitor lives on; else the next start records it. And the ledger
has every second of a run once."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from errors import LOST, RunFailed, UserError
from runtime import signals
from runtime.all_listeners import EndRecorder
from runtime.log import status
from runtime.log.events import append_event, read_events
from runtime.log.ledger import CAUSES, Account
from runtime.log.run_log import PAUSE_SECONDS
from runtime.log.status import end_start, read_status, record_failure, starts_of, write_status
from tests.runs import events_of, run_log_of


class Killed(BaseException):
    """Rank 0's process is gone."""


WORDS = {  # what a thread of rank 0 says of its end; the first one counts
    "main": ("finished", "all steps done"),
    "watchdog": ("failed", "step 5 hung"),
    "lost": ("failed", f"{LOST} after step 4"),
}
# where rank 0 is killed → whether its end is in events.jsonl by then
KILLS = {"never": True, "before": False, "in the line": False, "before status.json": True}
OTHERS: dict[str, Callable[[Path, dict[str, Any]], object]] = {
    "launcher": lambda folder, start: record_failure(folder, "rank 0 was killed", start["time"]),
    "monitor": lambda folder, start: end_start(folder, start, "failed", 4, "rank 0 is gone"),
    "next start": lambda folder, start: run_log_of(folder).start(4, 2),
}
ORDERS = [order for size in range(4) for order in itertools.permutations(OTHERS, size)]


def make_start(folder: Path, kill: str, threads: tuple[str, ...]) -> None:
    """One start, until its end is written by these threads in turn, or until it is killed."""

    def append(where: Path, kind: str, **about: Any) -> dict[str, Any]:
        if kill == "in the line" and kind == "end":
            (where / "events.jsonl").open("a").write('{"event": "end", "ti')
            raise Killed
        return append_event(where, kind, **about)

    about = {"side_effect": Killed} if kill == "before status.json" else {"wraps": write_status}
    with (
        suppress(Killed),
        patch("runtime.log.run_log.write_status", **about),
        patch.object(status, "append_event", append),
        run_log_of(folder) as log,
    ):
        log.start(4, 2)
        if kill == "before":
            raise Killed
        for name in threads:
            log.end(*WORDS[name])


def check_one_end(folder: Path, kill: str, threads: tuple[str, ...], order: Any) -> None:
    make_start(folder, kill, threads)
    start = read_events(folder)[0]
    for other in order:
        OTHERS[other](folder, start)
    kinds = [e["event"] for e in read_events(folder) if e["event"] in ("start", "end")]
    told = KILLS[kill] or bool(order)
    assert kinds == ["start", *["end"] * told, *["start"] * ("next start" in order)]
    if kill == "never" and "next start" not in order:
        state, reason = WORDS[threads[0]]
        (end,), last = events_of(folder, "end"), read_status(folder)
        assert (end["state"], end["reason"], last["state"]) == (state, reason, state)
        # a launcher knows better than a rank that lost the others
        better = "launcher" in order and reason.startswith(LOST)
        assert last["reason"] == ("rank 0 was killed" if better else reason)


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("threads", [("watchdog", "main"), ("lost",)])
def test_a_start_has_one_end(tmp_path: Path, kill: str, threads: tuple[str, ...]) -> None:
    for number, order in enumerate(ORDERS):
        check_one_end(tmp_path / str(number), kill, threads, order)


@pytest.mark.parametrize("order", [order for order in ORDERS if len(order) > 1])
def test_control_if_nobody_looks_there_are_more(tmp_path: Path, order: Any) -> None:
    def unended(folder: Path) -> list[dict[str, Any]]:
        return [one | {"ended": False} for one in starts_of(folder)]

    with patch.object(status, "starts_of", unended), pytest.raises(AssertionError):
        check_one_end(tmp_path, "before", (), order)


def race(folder: Path, writers: int) -> int:
    """The number of ends of a start, of which so many processes learn at the same time."""
    run_log_of(folder).start(4, 2)
    start, gate, children = read_events(folder)[0], folder / "go", []
    for number in range(writers):
        if not (child := os.fork()):
            while not gate.exists():
                time.sleep(0.001)
            end_start(folder, start, "failed", number, "gone")
            os._exit(0)
        children.append(child)
    gate.touch()
    for child in children:
        os.waitpid(child, 0)
    return len(events_of(folder, "end"))


def test_processes_at_the_same_time(tmp_path: Path) -> None:
    def slowly(folder: Path) -> list[dict[str, Any]]:
        found = starts_of(folder)
        time.sleep(0.05)
        return found

    with patch.object(status, "starts_of", slowly):
        assert race(tmp_path / "locked", 4) == 1
        with patch.object(status, "locked", lambda *_: nullcontext()):
            assert race(tmp_path / "control", 4) > 1


def test_two_threads_at_the_same_time(tmp_path: Path) -> None:
    """And the event of the start could not be written: the disk was full then."""

    def slowly(*about: Any) -> Any:
        time.sleep(0.05)
        return end_start(*about)

    log = run_log_of(tmp_path)
    log.start(4, 2)
    (tmp_path / "events.jsonl").unlink()
    threads = [threading.Thread(target=log.end, args=WORDS[n]) for n in ("main", "watchdog")]
    with patch("runtime.log.run_log.end_start", slowly):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (found,) = events_of(tmp_path, "end")
    assert read_status(tmp_path)["reason"] == found["reason"]


def test_a_start_that_fails_outside_of_its_steps(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    with pytest.raises(UserError), run_log_of(tmp_path, lines.append):
        raise UserError("a.b", 1, "is wrong", "mend it")
    assert lines[-1]["event"]["event"] == "refused"
    assert not list(tmp_path.iterdir()), "a start that is refused leaves nothing"
    with pytest.raises(RunFailed), run_log_of(tmp_path):
        raise RunFailed("no data")
    log = run_log_of(tmp_path)
    log.start(4, 2)
    with pytest.raises(RunFailed), log:
        raise RunFailed("the next stage cannot be loaded")
    said = [(event["step"], event["reason"]) for event in events_of(tmp_path, "end")]
    assert said == [(0, "no data"), (4, "the next stage cannot be loaded")]


@pytest.fixture
def clock() -> Iterator[list[float]]:
    """What the monotonic clock says, since this process began."""
    told = [0.0]
    with (
        patch("runtime.log.ledger.time.monotonic", lambda: 990.0 + told[0]),
        patch.object(signals, "STARTED", 990.0),
    ):
        yield told


def test_how_long_silence_may_last(tmp_path: Path, clock: list[float]) -> None:
    """An hour outside of steps, or twice what the same has taken; during steps twice the watchdog's
    limit, for as many as are logged together."""
    lines: list[dict[str, Any]] = []
    with run_log_of(tmp_path, lines.append) as log:
        log.start(0, 2)
        log.busy("")
        log.record({"step": 10}, 2.0)
        log.record({"step": 20}, 100.0)
        log.busy("saving")
        clock[0] += 7000.0
        log.busy("")
        log.busy("saving")
        log.leave_data_stage()
    guard, hour = log.guard, PAUSE_SECONDS
    short, long = (max(guard.hang_seconds, guard.hang_factor * log.interval * s) for s in (2, 100))
    assert [(next(iter(line)), line["due"]) for line in lines] == [
        ("busy", hour), ("event", hour), ("busy", hour),  # until the first logged step
        ("record", 2 * short), ("record", 2 * long), ("busy", hour), ("busy", 2 * long),
        ("busy", 14_000.0), ("busy", hour), ("event", hour),
    ]  # fmt: skip


def test_the_ledger_of_a_told_story() -> None:
    """The ledger of a known sequence of events equals figures computed by hand: the run is killed
    in step 7 after a checkpoint at 4, and its second start rolls back from step 9 to 8."""

    def spent(step: int, **seconds: float) -> dict[str, Any]:
        return {"event": "spent", "time": 0.0, "step": step, "seconds": seconds}

    events = [
        {"event": "start", "time": 0.0, "began": 100.0, "step": 0},
        spent(2, start=5.0, steps=2.0, data=0.5),
        spent(6, steps=4.0, saving=1.0),  # until 112.5; steps 5 and 6, half of 4.0, are repeated
        {"event": "start", "time": 0.0, "began": 120.0, "step": 4},
        # until 132; step 9, a fifth of 5.0, is repeated
        spent(9, start=5.0, steps=5.0, evaluation=2.0),
        {"event": "rollback", "time": 0.0, "from_step": 9, "step": 8},
        spent(10, rollback=3.0, steps=2.0, end=1.0),
    ]
    expected = dict.fromkeys(CAUSES, 0.0) | {
        "steps": 10.0, "lost": 3.0, "data": 0.5, "saving": 1.0, "evaluation": 2.0,
        "rollback": 3.0, "start": 10.0, "end": 1.0, "down": 7.5,
    }  # fmt: skip
    assert Account(events).seconds == pytest.approx(expected)
    assert sum(expected.values()) == 138.0 - 100.0


def test_the_ledger_counts_every_second_once(tmp_path: Path, clock: list[float]) -> None:
    log = run_log_of(tmp_path)
    clock[0] = 10
    log.start(3, 8)
    log.busy("")
    clock[0] += 7
    log.ledger.step_done(waited=2.0)
    log.busy("saving")
    clock[0] += 3
    log.busy("")
    log.write_spent()
    clock[0] += 1
    log.leave_data_stage()
    clock[0] += 4
    log.start(3, 8)  # a later stage of the data, which is no start
    log.busy("")
    log.write_spent()
    start, *spent = read_events(tmp_path)
    assert [event["seconds"] for event in spent] == [
        {"start": 10.0, "steps": 5.0, "data": 2.0, "saving": 3.0},
        {"end": 1.0},
        {"start": 4.0},
    ]
    assert (start["step"], start["world_size"]) == (3, 8)


@pytest.mark.parametrize(("cause", "counted"), [("", "lost"), ("evaluation", "evaluation")])
def test_the_time_of_a_failure_is_no_training(
    tmp_path: Path, clock: list[float], cause: str, counted: str
) -> None:
    """Nor if it comes just after the checkpoint from which the next start continues."""
    log = run_log_of(tmp_path)
    log.start(40, 2)
    log.busy("")
    log.busy(cause)
    clock[0] += 600
    run: Any = SimpleNamespace(log=log, step=40)
    with patch("runtime.all_listeners.dist.get_rank", lambda: 1):
        EndRecorder().closes(run, RuntimeError("gone"))
    append_event(tmp_path, "start", began=time.time(), step=40, world_size=2)
    assert Account(read_events(tmp_path)).seconds[counted] == pytest.approx(600)
