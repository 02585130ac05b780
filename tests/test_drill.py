"""Runs survive ranks killed in any phase: the short form of benchmarks/kill_drill.py."""

import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
import yaml

from benchmarks import kill_drill
from benchmarks.kill_drill import LAYOUTS, WHERE, Kill, check_folder, last_state, numbers, plan
from runtime import signals
from runtime.records.events import append_event, read_events
from runtime.records.ledger import CAUSES, Ledger, account
from tests.runs import dies, train_run, write_config
from tools.ranks import Ranks
from tools.report import __main__ as report


def drilled(arguments: list[str], kill: Kill | None) -> str:
    # the time of this start, not that of the server from which this process was forked
    signals.STARTED = time.monotonic()
    if kill is not None and kill.rank == dist.get_rank():
        with kill_drill.planted(kill):
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
    runs = {}
    for name, kills in (("alone", []), ("drilled", KILLS[world])):
        folder = tmp_path / name
        folder.mkdir()
        config = write_config(
            folder, data, parallel=LAYOUTS[world], checkpoint={"interval": 2, "keep_last": 2},
            train={"steps": 10, "eval_interval": 3, "eval_samples": 8},
        )  # fmt: skip
        run = runs[name] = folder / "run"
        began = time.time()
        for kill in kills:
            with dies(f"rank {kill.rank}: died with exit code -9"):
                ranks.run(drilled, world, [config], kill)
            assert check_folder(run)["wrong"] == []
        assert ranks.run(drilled, world, [config], None) == [""] * world
        took = time.time() - began
    assert numbers(runs["drilled"]) == numbers(runs["alone"])
    expected, found = last_state(runs["alone"]), last_state(runs["drilled"])
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)

    events = read_events(runs["drilled"])
    seconds = account(events)
    causes = ("steps", "lost", "evaluation", "saving", "start", "end", "down")
    assert min(seconds[cause] for cause in causes) > 0
    first, last = (next(e for e in events if e["event"] == "start")["began"], events[-1]["time"])
    assert sum(seconds.values()) == pytest.approx(last - first, abs=0.5)
    assert last - first <= took


@pytest.mark.thorough
def test_torchrun_restarts_by_itself(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """After a rank is killed, `torchrun --max-restarts` restarts the run without intervention, and
    it ends exactly as an undisturbed run."""
    raw = kill_drill.small(Path(write_config(tmp_path, data)), 4, steps=6)
    (tmp_path / "alone.yaml").write_text(yaml.safe_dump(raw))
    assert ranks.run(train_run, 4, [str(tmp_path / "alone.yaml")]) == [""] * 4
    found = kill_drill.drill(
        tmp_path / "drilled", raw, 4, [Kill(2, "step", 4, 0.0)], alone=tmp_path / "run"
    )
    assert found["kills"] == 1
    assert found["numbers_equal_bitwise"]
    assert found["last_state_equal_bitwise"]
    assert found["wrong"] == []
    assert found["ledger_sum_seconds"] <= found["wall_clock_seconds"]


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


# --- the ledger -----------------------------------------------------------------------------------


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


def test_the_ledger_counts_every_second_once(tmp_path: Path) -> None:
    clock = [1000.0]
    with (
        patch("runtime.records.ledger.time.monotonic", lambda: clock[0]),
        patch.object(signals, "STARTED", 990.0),
    ):
        ledger = Ledger(tmp_path, 3, 8)
        ledger.spent("start")
        clock[0] += 7
        ledger.spent("steps", data_seconds=2.0)
        ledger.write(5)
        clock[0] += 1
        ledger.spent("end")
        ledger.write(5)
    events = read_events(tmp_path)
    assert [event.get("seconds") for event in events] == [
        None,
        {"start": 10.0, "steps": 5.0, "data": 2.0},
        {"end": 1.0},
    ]
    assert (events[0]["step"], events[0]["world_size"]) == (3, 8)


def test_a_line_that_was_cut_off_harms_no_other(tmp_path: Path) -> None:
    append_event(tmp_path, "hang", step=1)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "spent", "ti')
    append_event(tmp_path, "hang", step=2)
    assert [event["step"] for event in read_events(tmp_path)] == [1, 2]


def test_the_report_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_event(tmp_path, "start", began=10.0, step=0, world_size=1)
    append_event(tmp_path, "spent", step=4, seconds={"steps": 3.0, "start": 1.0})
    assert report.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"{'steps':<22}         3.0 s   75.0%" in said
    assert f"{'wall clock':<22}         4.0 s" in said
    assert report.main([str(tmp_path / "nothing")]) == 2
    assert "RUN = " in capsys.readouterr().err
