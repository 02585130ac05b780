"""Alarms: each kind reaches a person, also when rank 0 is gone, and none for nothing."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

from runtime.checkpoint.folder import MANIFEST
from runtime.log.events import read_events
from runtime.log.status import read_status, write_status
from runtime.monitor import rank_0
from runtime.monitor.alarms import ALWAYS, TEMPLATES, Series
from runtime.monitor.process import END_EVENT_SECONDS, ENDING_SECONDS, MonitorProcess
from settings.load import load_config
from tests import ROOT
from tests.monitor.alert_helpers import START, FedMonitor, Receiver, settings_of

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
    ("spent", {"step": 1, "seconds": {"steps": 1.0}}),
    ("checkpoint", {"step": 5, "bytes": 10, "stall_seconds": 0.1, "write_seconds": 0.1}),
]
ODD = (b"[1]", b"{", b"", b'{"event": []}', b'{"event": {"event": "start", "time": 1, "step": 0}}',
       b'{"event": {"event": "end", "time": 1, "failed": 1}, "due": "x"}', b"\xff", b"[" * 10_000,
       b'{"record": {"step": "x"}}', b'{"record": 3, "due": NaN}')  # fmt: skip


def test_every_alarm_is_received(tmp_path):
    """And odd lines are left out."""
    with Receiver() as server, FedMonitor(tmp_path, on_event=server.url) as monitor:
        assert monitor.process.stdin is not None
        for event, about in [*QUIET, *EVENTS]:
            monitor.process.stdin.write(b"\n".join([*ODD, b""]))
            monitor.event(event, **about)
        monitor.end(ENDING_SECONDS)
        received = server.received
    # Control: what is not worth a message is not sent.
    assert server.kinds() == [event for event, _ in EVENTS]
    assert {event for event, _ in EVENTS} == TEMPLATES.keys() - {
        "stalled", "resumed", "died", "refused", "job", "after_commit",
    }  # fmt: skip
    for sent in received:
        assert f"{sent['event']} at step" not in sent["text"], "a sentence, not a list of fields"
    spike = received[4]
    assert spike["text"] == "runs/x: skipped 1 updates up to step 12: loss nan, gradient norm inf"
    assert (spike["run"], spike["step"]) == ("runs/x", 12)
    assert spike["folder"] == str(monitor.run)
    assert spike["details"]["loss"] == "nan"  # JSON has no NaN
    assert received[-1]["text"] == "runs/x: finished at step 20: all steps done"
    assert monitor.process.returncode == 0
    assert monitor.log.read_text() == ""


def test_a_killed_rank_0_is_reported(tmp_path):
    """The pipe's other end closes, as when rank 0 is killed. The launcher records nothing. If the
    monitor was stopped for a while, it first hears what was said: it misses no step."""
    with Receiver() as server, FedMonitor(tmp_path, on_event=server.url) as monitor:
        monitor.start()
        server.wait_for("start")
        monitor.step(6, due=3.0)
        time.sleep(0.2)
        monitor.process.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        monitor.step(7)
        # what stops the run does not stop it
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGINT):
            monitor.process.send_signal(number)
        monitor.end()
        assert server.kinds() == ["start", "died"]
    assert server.received[-1]["step"] == 7
    ends = [(event["event"], event["step"]) for event in read_events(tmp_path / "run")[1:]]
    assert sorted(ends) == [("died", 7), ("end", 7)]


def test_a_stall_and_a_death_are_noticed_although_the_file_system_hangs(tmp_path):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "events.jsonl")  # whoever opens it waits
    told = {"prometheus": str(tmp_path / "x.prom"), "past": 1}
    with Receiver() as server, FedMonitor(tmp_path, on_event=server.url, **told) as monitor:
        monitor.tell(event=START)
        monitor.step(1, due=0.1)
        server.wait_for("start", "stalled")
        assert "(in: steps)" not in server.received[1]["text"]  # it still starts
        monitor.end(END_EVENT_SECONDS + ENDING_SECONDS)
        assert server.kinds() == ["start", "stalled", "died"]
    assert [sent["step"] for sent in server.received] == [0, 1, 1]


class Here(MonitorProcess):
    """A monitor in this process; what it would send is kept."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(settings_of(folder, **settings))
        self.sent: list[dict[str, Any]] = []
        self.logged, self.due = 0.0, 3600.0

    def _note(self, event: dict[str, Any]) -> None:
        self.sent.append(event)


@pytest.mark.parametrize("is_torchrun", [False, True])
def test_the_launcher_says_how_rank_0_ended(tmp_path, is_torchrun):
    """It also writes the event, so the monitor does not. torchrun never does: the monitor, which
    may end with it, does not wait."""
    config = load_config("configs/laptop.yaml", [f"run.dir={tmp_path}", "run.on_event=cat"])
    with (
        patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "x"} if is_torchrun else {}),
        patch.object(rank_0.dist, "get_rank", return_value=0),
        patch.object(rank_0, "start_monitor", side_effect=OSError) as start,
    ):
        rank_0.Monitor(config, Mock()).__enter__()
    monitor = Here(tmp_path, launcher_records=start.call_args.args[0]["launcher_records"])
    monitor.hear_event(START)
    said = ("failed", 3, "rank 0 was killed")
    launcher = threading.Timer(0.2, write_status, (tmp_path, *said))
    launcher.start()
    monitor.end()
    launcher.join()
    end = monitor.sent[-1]
    if is_torchrun:
        assert end["event"] == "died"
    else:
        assert (end["event"], end["state"], end["step"], end["reason"]) == ("end", *said)
        assert read_events(tmp_path) == []


def test_the_clock_of_stalls(tmp_path):
    """Whatever rank 0 says, it says for how long it may be silent after that."""
    monitor = Here(tmp_path)

    def said(now: float) -> list[tuple[str, float, str]]:
        monitor.look(now)
        sent, monitor.sent = monitor.sent, []
        return [(each["event"], each["seconds"], each.get("busy", "")) for each in sent]

    assert said(3600.0) == []
    monitor.hear({"busy": "", "due": 3600.0}, 100.0)  # the first step may compile
    assert said(3700.0) == []
    monitor.hear({"record": {"step": 1}, "due": 60.0}, 3700.0)
    assert said(3760.0) == []
    assert said(3760.1) == [("stalled", pytest.approx(60.1), "steps")]
    assert said(9000.0) == []  # reported once
    monitor.hear({"busy": "saving", "due": 3600.0}, 9001.0)
    assert said(9001.0) == []  # that is no step
    monitor.hear({"record": {"step": 2}, "due": 3600.0}, 9002.0)
    assert said(9002.0) == [("resumed", 5302.0, "")]
    assert said(9002.0 + 3600.1) == [("stalled", pytest.approx(3600.1), "saving")]
    # what has no time of its own leaves the time as it is
    monitor.hear({"record": {"step": 3}, "due": 10.0}, 0.0)
    monitor.sent.clear()  # `resumed`
    monitor.hear({"record": {"step": 4}}, 5.0)
    assert said(10.1) == [("stalled", pytest.approx(5.1), "saving")]


def test_after_a_failure_the_file_is_left_to_the_next_start(tmp_path):
    """Its monitor may live on for a while. An end that this start has noted of the one before
    (`noted_later`) is not its own. Control: after the last start the file is renewed."""
    path = tmp_path / "x.prom"
    for state, is_left in (("failed", True), ("finished", False)):
        monitor = Here(tmp_path, prometheus=str(path))
        monitor.hear_event({"event": "end", "state": "requeue", "noted_later": True})
        assert monitor.end_state == ""
        monitor.hear_event({"event": "end", "time": 1.0, "state": state, "step": 0})
        monitor.end()
        path.write_text("of the next start\n")
        monitor.files.submit(monitor._show).result()
        assert (path.read_text() == "of the next start\n") == is_left


class Told(rank_0.Monitor):
    """Rank 0's side, and the end of its pipe."""

    def __init__(self) -> None:
        self.read, write = os.pipe()
        os.set_blocking(write, False)
        pipe = open(write, "wb", buffering=0)  # noqa: SIM115
        self.process = SimpleNamespace(stdin=pipe, poll=lambda: -9)  # type: ignore[assignment]
        self._is_cut = self._has_finished = False


def test_telling_never_waits(capsys):
    """The monitor may hang: here nobody reads the pipe until it is full. A line that it took only
    in part spoils no other. That it has died is said once."""
    told = Told()
    for number in range(100):  # more than a pipe holds
        told.tell({"event": {"event": "x" * 5000, "number": number}})
    found = os.read(told.read, 1 << 20)
    assert not found.endswith(b"\n"), "control: it was cut"
    told.tell({"busy": "saving"})
    *lines, cut, last, end = (found + os.read(told.read, 1 << 20)).split(b"\n")
    assert [json.loads(line)["event"]["number"] for line in lines] == [*range(len(lines))]
    assert (json.loads(last), end) == ({"busy": "saving"}, b"")
    assert cut
    assert not capsys.readouterr().err  # control
    os.close(told.read)
    for _ in range(3):
        told.tell({"busy": ""})
    assert capsys.readouterr().err.count("the monitor ended with status -9") == 1
    closed = Told()
    closed.process.stdin.close()  # type: ignore[union-attr]
    closed.tell({"busy": ""})  # by a save that has outlived the start


def test_an_end_waits_for_the_monitor_no_longer_than_stated(monkeypatch):
    """Its webhook may hang."""
    for name in ("BRIEF_SECONDS", "ENDING_SECONDS", "END_EVENT_SECONDS"):
        monkeypatch.setattr(rank_0, name, 0.1)
    for has_finished in (False, True):
        told, began = Told(), time.monotonic()
        told.config, told.signals = Mock(), Mock(heard=False)
        told.config.checkpoint.after_commit, told._has_finished = "", has_finished
        with subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE) as told.process:
            told.__exit__(None, None, None)
            assert 0.1 < time.monotonic() - began < 10
            told.process.kill()


@pytest.mark.parametrize("is_noticed", [False, True])
def test_a_finished_run_says_what_a_dead_monitor_has_left(tmp_path, is_noticed):
    told = Told()
    told.config, told.signals = Mock(), Mock(heard=False)
    told.config.run.dir, told.config.checkpoint.after_commit_minutes = tmp_path, 1.0
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000004" / MANIFEST).write_text('{"sha256": "a"}')
    write_status(tmp_path, "finished", 4, "all steps done")
    if is_noticed:
        os.close(told.read)
    told.tell({"event": {"event": "end", "state": "finished"}})
    assert (told.process is None) == is_noticed
    told.__exit__(None, None, None)
    left = {"done_step": None, "pending": ["step-00000004"]}
    assert read_status(tmp_path).get("after_commit") == left


# of a rank, by torchrun (torch 2.13) and the job script
OF_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
           "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
           "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
           "TORCHELASTIC_MAX_RESTARTS", "PET_LOG_DIR", "LATTICE_STOP_FILE")  # fmt: skip


def test_a_command_is_no_rank_of_the_run(tmp_path, monkeypatch):
    """What else rank 0 has in its environment, a command gets too: the key of a store, say."""
    for name in (*OF_RANK, "LOCAL_SCRATCH", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "x")
    with FedMonitor(tmp_path, on_event="sh -c 'env >environment'") as monitor:
        monitor.start()
        monitor.end()
    lines = (tmp_path / "environment").read_text().splitlines()
    found = {line.partition("=")[0] for line in lines}
    assert not found & {*OF_RANK}
    assert {"LATTICE_EVENT", "LOCAL_SCRATCH", "AWS_ENDPOINT_URL"} <= found  # control


def test_what_fails_for_one_line_is_said_and_the_next_is_heard(tmp_path, monkeypatch, capsys):
    """And an alarm that was lost is recorded."""
    note = Mock(side_effect=[KeyError("rank"), KeyError("rank"), None])
    monitor = MonitorProcess(settings_of(tmp_path, prometheus=str(tmp_path / "x.prom")))
    monkeypatch.setattr(monitor.state, "note_event", note)
    for step in (0, 1):
        monitor.hear_event({"event": "hang", "time": 1.0, "step": step, "where": "here"})
    monitor._lost({"text": "x: hangs", "event": "hang"}, "no connection")
    monitor.files.shutdown()
    (event,) = read_events(tmp_path)
    assert (event["event"], event["about"]) == ("undelivered", "hang")
    assert note.call_args.args[0]["event"] == "undelivered"
    said = capsys.readouterr().err
    assert said.count("alerts: warning: ") == said.count("KeyError: 'rank'") == 2, said


def test_the_monitor_imports_nothing_heavy():
    program = "import sys, runtime.monitor.process; print(*sys.modules)"
    found = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=ROOT).split()
    heavy = {"torch", "numpy", "pydantic", "yaml", "prometheus_client", "training", "model", "data"}
    assert not heavy.intersection(found)
    assert "runtime.monitor.process" in found


def test_spikes_come_in_series():
    series = Series()
    events: list[dict[str, Any]] = [{"event": "spike"} for _ in range(15)]
    for number, event in enumerate(events):
        series.passes(event, 10.0 * number)
    counts = {10 * number: e["not_sent"] for number, e in enumerate(events) if "not_sent" in e}
    assert counts == {0: 0, 60: 5, 120: 5}
    # a night in which a command fails every 30 s and every GPU of two nodes is slow
    slow = [{"event": "slow_rank", "rank": r, "node": f"n{r // 8}"} for r in range(16)]
    others = [{"event": each} for each in ("after_commit", *ALWAYS)]
    told = [
        event["event"]
        for now in range(0, 8 * 3600, 30)
        for event in (*slow, *others)
        if series.passes(dict(event), float(now))
    ]
    # control: some are never left out
    assert Counter(told) == {**dict.fromkeys(ALWAYS, 960), "after_commit": 8, "slow_rank": 16}
    # a rank that is slow and then well: both are sent; slow again: the last word is what holds
    about = {"event": "slow_rank", "rank": 0, "node": "n9"}
    told_of = [about, {**about, "ended": True}, about, about]
    passed = [series.passes(event, float(now)) for now, event in enumerate(told_of)]
    assert passed == [True, True, True, False]
