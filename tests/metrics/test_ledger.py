"""The ledger says where a run's time went: every second once."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from runtime import signals
from runtime.log.events import append_event, read_events
from runtime.log.ledger import CAUSES, account
from tests.runs import run_log_of
from tools.report import __main__ as report


def test_the_ledger_of_a_told_story() -> None:
    """The ledger of a known sequence of events equals figures computed by hand: the run is killed
    in step 7 after a checkpoint at 4, and its second start rolls back from step 9 to 8."""

    def spent(step: int, **seconds: float) -> dict:
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
    assert account(events) == pytest.approx(expected)
    assert sum(expected.values()) == 138.0 - 100.0


def test_an_older_runs_boundary_changes_no_sum(tmp_path: Path) -> None:
    """Between two data stages, older versions wrote an end and a start of their own: to the digit,
    the sums are those of the same run without them, which has no gap there. And they are neither a
    start nor an end."""
    lines = [
        {"event": "start", "time": 0.0, "began": 100.0, "step": 0, "world_size": 2},
        {"event": "spent", "time": 0.0, "step": 3, "seconds": {"start": 5.1, "steps": 2.3}},
        {"event": "spent", "time": 0.0, "step": 4, "seconds": {"steps": 0.7, "end": 0.1}},
        {"event": "end", "time": 0.0, "step": 4, "state": "requeue", "stage": 1},
        {"event": "start", "time": 0.0, "began": 108.2, "step": 4, "world_size": 2, "stage": 1},
        {"event": "spent", "time": 0.0, "step": 9, "seconds": {"start": 1.3, "steps": 3.9}},
        {"event": "rollback", "time": 0.0, "step": 7},
    ]

    def told(chosen: list[dict[str, Any]]) -> list[dict[str, Any]]:
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chosen))
        return read_events(tmp_path)

    old, new = told(lines), told([line for line in lines if "stage" not in line])
    assert account(old) == account(new)
    assert [e["event"] for e in old if e["event"] != "boundary"] == [e["event"] for e in new]
    lines[4]["began"] += 1.5  # control: a gap is counted
    assert account(told(lines))["down"] == pytest.approx(1.5)


def test_the_ledger_counts_every_second_once(tmp_path: Path) -> None:
    clock = [1000.0]
    with (
        patch("runtime.log.ledger.time.monotonic", lambda: clock[0]),
        patch.object(signals, "STARTED", 990.0),
    ):
        log = run_log_of(tmp_path)
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


def test_the_report_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_event(tmp_path, "start", began=10.0, step=0, world_size=1)
    append_event(tmp_path, "spent", step=4, seconds={"steps": 3.0, "start": 1.0})
    assert report.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"{'steps':<22}         3.0 s   75.0%" in said
    assert f"{'wall clock':<22}         4.0 s" in said
    assert report.main([str(tmp_path / "nothing")]) == 2
    assert "RUN = " in capsys.readouterr().err
