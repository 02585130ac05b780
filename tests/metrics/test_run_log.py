"""Of each start, one end is recorded: never two, whoever else may know how it ended, and one as
long as rank 0, its launcher or its monitor lives on; else the next start records it."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from errors import LOST, RunFailed, UserError
from runtime.log import status
from runtime.log.events import append_event, read_events
from runtime.log.run_log import PAUSE_SECONDS
from runtime.log.status import end_start, read_status, record_failure
from tests.runs import run_log_of


class Killed(BaseException):
    """Rank 0's process is gone."""


def ends(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder) if event["event"] == "end"]


# --- interleavings --------------------------------------------------------------------------------

WORDS = {  # what a thread of rank 0 says of its end, the first to come being the one that counts
    "main": ("finished", "all steps done"),
    "watchdog": ("failed", "step 5 hung"),
    "lost": ("failed", f"{LOST} after step 4"),
}
KILLS = ("never", "before", "in the file", "between file and pipe", "before status.json")


def of_rank_0(folder: Path, kill: str, threads: tuple[str, ...]) -> dict[str, Any]:
    """One start, which is killed where its end is written, or just before; returns its event."""

    def sink(line: dict[str, Any]) -> None:
        if kill == "between file and pipe" and line.get("event", {}).get("event") == "end":
            raise Killed

    def append(where: Path, kind: str, **about: Any) -> dict[str, Any]:
        if kill == "in the file" and kind == "end":
            (where / "events.jsonl").open("a").write('{"event": "end", "ti')
            raise Killed
        return append_event(where, kind, **about)

    def write(*_: Any, **about: Any) -> None:
        if kill == "before status.json":
            raise Killed
        honest(*_, **about)

    honest = status.write_status
    with (
        suppress(Killed),
        patch.object(status, "append_event", append),
        patch("runtime.log.run_log.write_status", write),
        run_log_of(folder, sink) as log,
    ):
        log.start(4, 2)
        if kill == "before":
            raise Killed
        for name in threads:
            log.end(*WORDS[name])
    return read_events(folder)[0]


OTHERS: dict[str, Callable[[Path, dict[str, Any]], object]] = {
    "launcher": lambda folder, start: record_failure(folder, "rank 0 was killed"),
    "monitor": lambda folder, start: end_start(folder, start, "failed", 4, "rank 0 is gone"),
    "next start": lambda folder, start: run_log_of(folder).start(4, 2),
}
ORDERS = [
    order
    for size in range(len(OTHERS) + 1)
    for some in itertools.combinations(OTHERS, size)
    for order in itertools.permutations(some)
]


def check_one_end(folder: Path, kill: str, threads: tuple[str, ...], order: Any) -> None:
    start = of_rank_0(folder, kill, threads)
    for other in order:
        OTHERS[other](folder, start)
    events = [e for e in read_events(folder) if e["event"] in ("start", "end")]
    kinds = [event["event"] for event in events]
    told = kill in ("never", "between file and pipe", "before status.json") or bool(order)
    assert kinds == ["start", *["end"] * told, *["start"] * ("next start" in order)]
    if kill == "never" and "next start" not in order:
        state, reason = WORDS[threads[0]]
        # a launcher knows better than a rank that lost the others, in status.json
        known = "rank 0 was killed" if reason.startswith(LOST) and "launcher" in order else reason
        assert (events[1]["state"], events[1]["reason"]) == (state, reason)
        assert (read_status(folder)["state"], read_status(folder)["reason"]) == (state, known)


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("threads", [*itertools.permutations(WORDS, 2), ("main",)])
def test_a_start_has_one_end(tmp_path: Path, kill: str, threads: tuple[str, ...]) -> None:
    for number, order in enumerate(ORDERS):
        check_one_end(tmp_path / str(number), kill, threads, order)


@contextmanager
def nobody_looks() -> Iterator[None]:
    """Every process records what it knows."""
    with patch.object(
        status, "starts_of", lambda folder: [one | {"ended": False} for one in starts_of(folder)]
    ):
        yield


starts_of = status.starts_of


@pytest.mark.parametrize("order", [order for order in ORDERS if len(order) > 1])
def test_control_without_a_look_there_are_more(tmp_path: Path, order: Any) -> None:
    with nobody_looks(), pytest.raises(AssertionError):
        check_one_end(tmp_path, "before", (), order)


# --- at the same time -----------------------------------------------------------------------------


def race(folder: Path, writers: int) -> list[dict[str, Any]]:
    """The ends of a start, of which this many processes learn at the same time."""
    log = run_log_of(folder)
    log.start(4, 2)
    start, gate = read_events(folder)[0], folder / "go"
    children = []
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
    return ends(folder)


def test_processes_at_the_same_time(tmp_path: Path) -> None:
    for number in range(5):
        assert len(race(tmp_path / str(number), 4)) == 1


def test_control_without_a_lock_there_are_more(tmp_path: Path) -> None:
    def slowly(folder: Path) -> list[dict[str, Any]]:
        found = starts_of(folder)
        time.sleep(0.05)
        return found

    @contextmanager
    def unlocked(*_: Any) -> Iterator[None]:
        yield

    with patch.object(status, "starts_of", slowly):
        assert len(race(tmp_path / "locked", 3)) == 1
        with patch.object(status, "locked", unlocked):
            assert len(race(tmp_path / "unlocked", 3)) > 1


def test_threads_at_the_same_time(tmp_path: Path) -> None:
    for number in range(20):
        log = run_log_of(tmp_path / str(number))
        log.start(4, 2)
        gate = threading.Barrier(2)

        def end(words: tuple[str, str], log: Any = log, gate: Any = gate) -> None:
            gate.wait()
            log.end(*words)

        threads = [threading.Thread(target=end, args=[WORDS[name]]) for name in WORDS][:2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (found,) = ends(log.folder)
        assert read_status(log.folder)["reason"] == found["reason"]


def test_an_end_whose_start_could_not_be_written(tmp_path: Path) -> None:
    """The disk was full then."""
    log = run_log_of(tmp_path)
    log.start(4, 2)
    (tmp_path / "events.jsonl").unlink()
    log.end("finished", "all steps done")
    assert len(ends(tmp_path)) == 1
    assert read_status(tmp_path)["state"] == "finished"


# --- outside of steps -----------------------------------------------------------------------------


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
    assert [(event["step"], event["reason"]) for event in ends(tmp_path)] == [
        (0, "no data"),
        (4, "the next stage cannot be loaded"),
    ]


def test_how_long_silence_may_last(tmp_path: Path) -> None:
    """An hour outside of steps, or twice what the same has taken; twice the watchdog's limit
    during steps, for as many as are logged together."""
    clock, lines = [1000.0], []
    with (
        patch("runtime.log.ledger.time.monotonic", lambda: clock[0]),
        run_log_of(tmp_path, lines.append) as log,
    ):
        log.start(0, 2)
        log.busy("")
        log.record({"step": 10}, 2.0)
        log.record({"step": 20}, 100.0)
        log.busy("saving")
        clock[0] += 7000.0
        log.busy("")
        log.busy("saving")
        log.busy("evaluation")
        log.leave_stage()
    due = [(next(iter(line)), line["due"]) for line in lines]
    least, interval = log.guard.hang_seconds, log.interval
    usual = 2 * log.guard.hang_factor * interval
    hour, steps = PAUSE_SECONDS, max(2 * least, 100.0 * usual)
    assert due == [
        ("busy", hour), ("event", hour), ("busy", hour),  # until the first logged step
        ("record", max(2 * least, 2.0 * usual)), ("record", steps),
        ("busy", hour), ("busy", steps), ("busy", 14_000.0), ("busy", hour),
        ("event", hour), ("busy", hour),
    ]  # fmt: skip
