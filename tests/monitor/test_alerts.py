"""Alarms: each kind reaches a person, also when rank 0 is gone, and none for nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from runtime.log.events import append_event
from runtime.monitor import companion as process
from runtime.monitor.alarms import ALWAYS, TEMPLATES, Series, is_alarm
from runtime.monitor.companion import END_EVENT_SECONDS, ENDING_SECONDS
from runtime.monitor.rank_0 import Companion
from runtime.monitor.settings import Settings
from runtime.monitor.state import BUSY_SECONDS, FIRST_LINE_SECONDS, RunState, StallClock
from tests import ROOT
from tests.monitor.alert_helpers import FedCompanion, Receiver, wait_until

# One example of each event that events.py lists as an alarm and that a run itself writes.
EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("start", {"step": 0, "world_size": 8, "began": 0.0}),
    ("data_stage", {"step": 10, "data_stage": 2, "changes": ["train.seq_len 32 → 64"]}),
    ("spares", {"step": 0, "ranks": {"n3": 8}}),
    ("hang", {"step": 11, "where": "at train.py:1, waiting in no collective"}),
    ("spike", {"step": 12, "skipped": 1, "loss": float("nan"), "grad_norm": float("inf")}),
    ("rollback", {"from_step": 13, "step": 10, "left_out": [80, 96]}),
    ("checkpoint", {"step": 14, "failed": "OSError: no space left"}),
    ("slow_rank", {"step": 15, "rank": 3, "node": "n1", "factor": 1.3, "since": 12}),
    ("slow_rank", {"step": 16, "rank": 3, "node": "n1", "factor": 1.3, "since": 12, "ended": True}),
    ("suspicion", {"step": 16, "cause": "a spike", "verdict": "persistent", "ranks": [3],
                   "nodes": ["n1"], "why": "rank 3 differs from ranks 1 and 2"}),
    ("end", {"state": "finished", "step": 20, "reason": "all steps done"}),
]  # fmt: skip
QUIET = [
    ("system", {}),
    ("memory", {"step": 1, "peak_bytes": [1]}),
    ("spent", {"step": 1, "seconds": {"steps": 1.0}}),
    ("checkpoint", {"step": 5, "bytes": 10, "stall_seconds": 0.1, "write_seconds": 0.1}),
]


OF_NO_RUN = """{"event": "start", "time": 1, "step": 0}
[1]
{"event": "end", "time": 1, "failed": 1}
"""
STALLS = {"hang_factor": 1e-6, "hang_seconds": 0.75}  # the limit is twice as long


def test_every_alarm_is_received(tmp_path: Path) -> None:
    with Receiver() as server, FedCompanion(tmp_path, on_event=server.url) as companion:
        companion.event("rollback", from_step=3, step=2)
        for event, about in [*QUIET, *EVENTS]:
            with open(companion.run / "events.jsonl", "a") as file:
                file.write(OF_NO_RUN)
            companion.event(event, **about)
        took = companion.end()
        received = server.received
    # Control: what is not worth a message is not sent.
    assert server.kinds() == ["rollback", *(event for event, _ in EVENTS)]
    assert {event for event, _ in EVENTS} == TEMPLATES.keys() - {
        "stalled", "resumed", "died", "refused", "job", "after_commit",
    }  # fmt: skip
    for sent in received[1:]:
        assert f"{sent['event']} at step" not in sent["text"], "a sentence, not a list of fields"
    spike = received[5]
    assert spike["text"] == "runs/x: skipped 1 updates up to step 12: loss nan, gradient norm inf"
    assert (spike["run"], spike["step"]) == ("runs/x", 12)
    assert spike["folder"] == str(companion.run)
    assert spike["details"]["loss"] == "nan"  # JSON has no NaN
    assert received[-1]["text"] == "runs/x: finished at step 20: all steps done"
    assert took < ENDING_SECONDS
    assert companion.process.returncode == 0
    said = companion.log.read_text()
    assert said.count("\n") == said.count("line 2 is no whole record") == 1, said


def test_a_killed_rank_0_is_reported(tmp_path: Path) -> None:
    """The pipe's other end closes however rank 0 goes: here its process is killed."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import time\n"
        "from tests.monitor.alert_helpers import FedCompanion\n"
        "held = FedCompanion(Path(sys.argv[2]), on_event=sys.argv[3])\n"
        "held.event('start', step=0, world_size=1, began=0.0); held.step(7)\n"
        "print(held.process.pid, flush=True); time.sleep(600)\n"
    )
    with Receiver() as server:
        command = [sys.executable, "-c", program, str(ROOT), str(tmp_path), server.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as rank_0:
            assert rank_0.stdout is not None
            companion = int(rank_0.stdout.readline())
            server.wait_for("start")
            os.kill(companion, signal.SIGTERM)  # what stops the run does not stop it
            os.kill(companion, signal.SIGINT)
            rank_0.kill()
        server.wait_for("start", "died")
        wait_until(lambda: not _runs(companion), ENDING_SECONDS + END_EVENT_SECONDS)
    assert server.received[-1]["step"] == 7


def _runs(pid: int) -> bool:
    """Whether a process runs, and is no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_run_that_stalls_is_reported_and_so_is_its_recovery(tmp_path: Path) -> None:
    with Receiver() as server, FedCompanion(tmp_path, on_event=server.url, **STALLS) as companion:
        companion.event("start", step=0, world_size=1, began=0.0)
        server.wait_for("start")  # it reads what is added from now on
        companion.step(1)
        server.wait_for("start", "stalled")
        companion.step(2)
        server.wait_for("start", "stalled", "resumed")
        companion.event("end", state="finished", step=2, reason="")
        companion.end()
    assert [sent["step"] for sent in server.received[1:3]] == [1, 2]
    assert [event["step"] for event in companion.recorded("stalled")] == [1]
    assert "(in: steps)" in server.received[1]["text"]


class Here(process.Companion):
    """A companion in this process, by a clock of the test's own; what it would send is kept."""

    def __init__(self, folder: Path) -> None:
        self.kinds: list[str] = []
        with patch.object(process, "time", SimpleNamespace(monotonic=lambda: 0.0)):
            super().__init__(Settings(str(folder), "runs/x", str(folder), 0, **STALLS))
        self._read_records()  # of an earlier start

    def _send(self, event: dict[str, Any]) -> None:
        self.kinds.append(event["event"])

    def at(self, now: float) -> list[str]:
        """Read what the run has written, and look for a stall; all that was sent until then."""
        with patch.object(process, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: 0)):
            self._survive(self._read)
            self.look(now)
        return [*self.kinds]


def add_steps(folder: Path, *steps: int, name: str = "metrics.jsonl") -> None:
    with open(folder / name, "a") as file:
        file.writelines(f'{{"step": {step}, "loss": 2.5}}\n' for step in steps)


def replace_steps(folder: Path, *steps: int) -> None:
    """Replace metrics.jsonl by a file with these steps."""
    add_steps(folder, *steps, name="new")
    os.replace(folder / "new", folder / "metrics.jsonl")


def test_a_replaced_file_is_no_step(tmp_path: Path) -> None:
    """A start that resumes, a stage and a rollback replace metrics.jsonl, whose last line is then
    an old one. The first step may still take as long as a compilation."""
    replace_steps(tmp_path, 4, 5)
    companion = Here(tmp_path)
    append_event(tmp_path, "start", step=4, world_size=1, began=0.0)
    companion.at(1.0)
    replace_steps(tmp_path, 4)
    companion.at(2.0)
    assert companion.at(FIRST_LINE_SECONDS - 1) == ["start"]
    add_steps(tmp_path, 5)
    first = FIRST_LINE_SECONDS  # which this step took
    assert companion.at(first) == ["start"]
    assert companion.at(2 * first + 1) == ["start", "stalled"]  # control
    append_event(tmp_path, "rollback", from_step=5, step=4)
    replace_steps(tmp_path, 4)
    assert companion.at(3 * first) == ["start", "stalled", "rollback"]
    add_steps(tmp_path, 5)
    assert companion.at(4 * first) == ["start", "stalled", "rollback", "resumed"]


def test_an_ending_companion_leaves_the_next_start_to_the_next_one(tmp_path: Path) -> None:
    """Its own start ends, and the next begins before it has ended."""
    file = tmp_path / "x.prom"
    with Receiver() as server:
        told = {"on_event": server.url, "prometheus": str(file)}
        with FedCompanion(tmp_path, **told) as old:
            old.event("start", step=0, world_size=1, began=0.0)
            old.event("end", state="requeue", step=4, reason="SIGTERM was received")
            server.wait_for("start", "end")
            with FedCompanion(tmp_path, **told) as new:
                new.event("start", step=4, world_size=1, began=0.0)
                new.event("rollback", from_step=5, step=4)
                wait_until(lambda: len(server.kinds()) == 4)
                wait_until(lambda: 'state="running"} 1.0' in file.read_text())
                old.end()
                # nothing is sent twice, by either, nor replaced by what the old one knows
                assert server.kinds() == ["start", "end", "start", "rollback"]
                assert 'state="running"} 1.0' in file.read_text()
                new.event("end", state="finished", step=6, reason="")
                new.end()
    assert server.kinds()[4:] == ["end"]


def test_rank_0_tells_its_companion_what_it_does(tmp_path: Path) -> None:
    """An evaluation that takes longer than a stall of steps is none."""
    replace_steps(tmp_path)
    companion = Here(tmp_path)
    append_event(tmp_path, "start", step=0, world_size=1, began=0.0)
    add_steps(tmp_path, 1)
    assert companion.at(1.0) == ["start"]
    companion.hear(b"evalua", 1.0)
    companion.hear(b"tion\n", 1.0)
    assert companion.at(100.0) == ["start"]
    companion.hear(b"\n", 100.0)
    assert companion.at(103.0) == ["start", "stalled"]  # control


def test_telling_never_waits() -> None:
    """The companion may hang: here nobody reads the pipe."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with open(read, "rb"), open(write, "wb", buffering=0) as pipe:
        told = Companion.__new__(Companion)
        told.process = SimpleNamespace(stdin=pipe)  # type: ignore[assignment]
        for _ in range(100_000):  # more than a pipe holds
            told.tell("evaluation")


def test_a_start_after_a_killed_one_has_an_end_of_its_own(tmp_path: Path) -> None:
    """It first notes the end of the start before (status.py). If it is killed too, that is
    reported."""
    companion = Here(tmp_path)
    noted = {"reason": "it recorded no end", "noted_later": True}
    append_event(tmp_path, "end", state="failed", step=3, **noted)
    append_event(tmp_path, "start", step=0, world_size=1, began=0.0)
    companion.reader.start()
    wait_until(lambda: companion.kinds == ["end", "start"])
    with patch.object(process, "END_EVENT_SECONDS", 0.1):
        companion._end()
    assert companion.kinds == ["end", "start", "died"]


def test_a_later_data_stage_is_no_restart() -> None:
    state, sent = RunState(), []
    for event in (
        {"event": "start", "time": 1.0, "began": 0.0, "step": 0},
        {"event": "end", "time": 2.0, "state": "requeue", "step": 4, "reason": "", "data_stage": 1},
        {"event": "start", "time": 3.0, "began": 2.0, "step": 4, "data_stage": 1},
        {"event": "data_stage", "time": 4.0, "data_stage": 1, "step": 4, "changes": []},
        {"event": "end", "time": 5.0, "state": "finished", "step": 9, "reason": ""},
    ):
        state.note_event(event)
        sent += [event["time"]] if is_alarm(event) else []
        assert state.state == ("finished" if event["time"] == 5.0 else "running")
        # the changeover is not a time without steps, for the rule LatticeNoStep
        assert event["time"] != 2.0 or state.start_time == 2.0
    assert sent == [1.0, 4.0, 5.0]
    assert (state.events["start"], state.start_time, state.state) == (1, 3.0, "finished")


def clock_after(*lines: float) -> StallClock:
    clock = StallClock(factor=3.0, least=1.0, now=0.0)
    for now in lines:
        clock.line(now)
    return clock


def test_the_clock_of_stalls() -> None:
    """By hand: a usual gap of 10 s, and the limit is 2 · factor 3 · 10 s."""
    clock = StallClock(factor=3.0, least=1.0, now=0.0)
    assert clock.stalled(FIRST_LINE_SECONDS) is None  # the first step may compile
    for now in (100.0, 110.0, 120.0, 130.0):
        assert clock.line(now) is None
    assert clock.stalled(130.0 + 59.9) is None
    assert clock.stalled(130.0 + 60.1) == pytest.approx(60.1)
    assert clock.stalled(130.0 + 99.0) is None  # reported once
    assert clock.line(330.0) == 200.0
    assert clock.stalled(330.0 + 60.1) is not None  # the stall did not become usual
    # lines that are always further apart than the least limit
    clock, now = StallClock(factor=10.0, least=120.0, now=0.0), 0.0
    for _ in range(50):
        now += 300.0
        assert clock.stalled(now) is None
        assert clock.line(now) is None
    assert clock.stalled(now + 20 * 300.0 + 1) is not None
    # also if the first of them was a stall
    clock = clock_after(1.0)
    assert clock.stalled(2.0 + FIRST_LINE_SECONDS) is not None
    assert clock.line(5000.0) is not None
    assert clock.stalled(9000.0) is None
    # lines that become further apart: reported at first, until that is usual
    clock, now, reported = clock_after(), 0.0, 0
    for line in range(200):
        now += 10.0 if line < 100 else 100.0
        reported += clock.stalled(now) is not None
        clock.line(now)
    assert 0 < reported <= 33
    # what rank 0 does besides steps has a limit of its own, and is not part of the time between
    # two lines, whether it ends before a line or after it
    clock = clock_after(100.0, 110.0, 120.0, 130.0)
    clock.busy("saving", 131.0)
    assert clock.stalled(131.0 + BUSY_SECONDS) is None
    assert clock.line(1000.0) is None
    clock.busy("", 1001.0)
    assert clock.stalled(1061.0) is None
    assert clock.stalled(1061.1) == pytest.approx(61.1)
    assert clock.line(1070.0) == 70.0
    clock.busy("evaluation", 1071.0)
    assert clock.stalled(1072.0 + BUSY_SECONDS) is not None  # control: it hangs
    clock.busy("", 6071.0)
    assert clock.line(6072.0) == 5002.0
    clock.busy("evaluation", 6073.0)
    assert clock.stalled(6073.0 + 9999.0) is None  # it took 5,000 s before
    # the first step of a later stage may compile, too; what was usual before is not any more
    clock = clock_after(100.0, 110.0, 120.0)
    clock.busy("start", 121.0)
    assert clock.stalled(121.0 + BUSY_SECONDS) is None
    clock.busy("", 500.0)
    assert clock.stalled(500.0 + FIRST_LINE_SECONDS) is None
    assert clock.line(700.0) is None
    assert clock.line(740.0) is None
    assert clock.stalled(740.0 + 6 * 40.0 + 1) == pytest.approx(241.0)  # control
    # control: a start that never logs a step
    assert clock_after().stalled(FIRST_LINE_SECONDS + 1) is not None


# --- parts ----------------------------------------------------------------------------------------


def test_what_fails_for_one_event_is_said_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    companion, noted = process.Companion(Settings(str(tmp_path), "r", "c", 0)), []

    def note(event: dict[str, Any]) -> None:
        if event["step"] < 2:
            raise KeyError("rank")
        noted.append(event["step"])

    monkeypatch.setattr(companion.state, "note_event", note)
    for step in (0, 1, 2):
        append_event(tmp_path, "hang", step=step, where="here")
    companion._read()
    assert noted == [2]
    said = capsys.readouterr().err
    assert said.count("alerts: warning: ") == said.count("KeyError: 'rank'") == 2, said


def test_the_companion_imports_nothing_heavy() -> None:
    program = "import sys, runtime.monitor.companion; print(*sys.modules)"
    found = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=ROOT)
    loaded = {name.split(".")[0] for name in found.split()}
    assert not loaded & {"torch", "numpy", "pydantic", "yaml", "training", "model", "data"}
    assert "runtime" in loaded


def test_spikes_come_in_series() -> None:
    series, sent = Series(), []
    for now in range(0, 150, 10):
        event: dict[str, Any] = {"event": "spike", "time": 0.0}
        if series.passes(event, float(now)):
            sent.append((now, event["not_sent"]))
        assert series.passes({"event": "hang"}, float(now))  # control: these are never left out
    assert sent == [(0, 0), (60, 5), (120, 5)]
    assert not is_alarm({"event": "unknown"})
    # a night in which a command fails every 30 s and every GPU of two nodes is slow
    series, counts = Series(), dict.fromkeys((*ALWAYS, "after_commit", "slow_rank"), 0)
    for now in range(0, 8 * 3600, 30):
        for event in (
            {"event": "after_commit", "step": now, "failed": f"attempt {now}"},
            *({"event": "slow_rank", "rank": r, "node": f"n{r // 8}"} for r in range(16)),
            *({"event": each} for each in ALWAYS),
        ):
            counts[event["event"]] += series.passes(event, float(now))
    assert counts == {**dict.fromkeys(ALWAYS, 960), "after_commit": 8, "slow_rank": 16}
    # a rank that is slow and then well: both are sent
    about = {"event": "slow_rank", "rank": 0, "node": "n9"}
    assert series.passes(about, 0.0)
    assert series.passes({**about, "ended": True}, 1.0)
    assert series.passes(about, 2.0)  # slow again: the last word is what holds
    assert not series.passes(about, 3.0)
