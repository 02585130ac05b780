"""The text for Prometheus: parsed by the reference parser, right in every number, and served on
loopback unless told otherwise. (tests/monitor/alerts_scenarios.py has a real Prometheus.)"""

import json
import socket
import urllib.request

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from errors import UserError
from runtime.log.ledger import CAUSES, Account
from runtime.monitor import check, prometheus
from runtime.monitor.prometheus import RunState, Shown, families
from tests.monitor.alert_helpers import START, FedMonitor, free_port, wait_until

EVENTS = [
    START,
    {"event": "spent", "time": 9.0, "step": 10, "seconds": {"start": 4.0, "steps": 5.0}},
    {"event": "checkpoint", "time": 10.0, "step": 10, "bytes": 64, "write_seconds": 0.1},
    {"event": "checkpoint", "time": 11.0, "step": 20, "failed": "no space"},
    {"event": "rollback", "time": 12.0, "from_step": 15, "step": 10},
    {"event": "after_commit", "time": 13.0, "step": 10, "attempts": 1, "failed": "no bucket"},
    {"event": "slow_rank", "time": 14.0, "step": 15, "rank": 3, "node": "n1", "factor": 1.3},
    {"event": "suspicion", "time": 14.5, "step": 15, "verdict": "reproducible"},
    {"event": "spares", "time": 15.0, "step": 0, "ranks": {"n7": 8, "n8": 8}},
]
RECORD = {"step": 12, "loss": float("nan"), "mfu": None, "lr": 3e-4, "peak_memory_bytes": 7,
          "router_z_loss": 0.5, "experts_by_layer": {"layer": [0]}}  # fmt: skip


def state_of(events: list[dict], *records: dict) -> RunState:
    state = RunState()
    for event in events:
        state.note_event(event)
    for record in records:
        state.note_record(record, logged=100.0)
    return state


def shown(state: RunState, run: str = "runs/x") -> dict[str, float]:
    metrics = Shown("")
    metrics.metrics = [*families(run, state)]
    return parsed(generate_latest(metrics.registry).decode(), run)


def parsed(text: str, run: str = "runs/x") -> dict[str, float]:
    """The samples of a text, by name and labels other than the run's."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in ("gauge", "counter"), family
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == run
            name = " ".join([sample.name, *map("=".join, sorted(labels.items()))])
            assert name not in samples
            samples[name] = sample.value
    return samples


def test_every_number_of_a_run():
    """What only one record has stays: a scrape, rarer than steps are, would see nothing of an
    evaluation, whose own record may have nothing else."""
    found = shown(state_of(EVENTS, {"step": 11, "eval_loss": 2.5}, RECORD), 'a "b"\\\n')
    expected = {
        "lattice_eval_loss": 2.5,
        "lattice_running": 1,
        "lattice_state state=running": 1,
        "lattice_state state=failed": 0,
        "lattice_last_step_timestamp_seconds": 100,
        "lattice_step": 12,
        "lattice_learning_rate": 3e-4,
        "lattice_peak_memory_bytes": 7,
        "lattice_record name=router_z_loss": 0.5,
        "lattice_events_total event=rollback": 1,
        "lattice_events_total event=checkpoint": 2,
        "lattice_failed_saves_total": 1,
        "lattice_start_timestamp_seconds": 1,
        "lattice_suspicions_total verdict=reproducible": 1,
        "lattice_suspicions_total verdict=persistent": 0,
        "lattice_checkpoint_step": 10,
        "lattice_checkpoint_timestamp_seconds": 10,
        "lattice_checkpoint_bytes": 64,
        "lattice_slow_rank_ratio node=n1 rank=3": 1.3,
        "lattice_spare_nodes": 2,
    }
    assert {each: found.get(each) for each in expected} == expected
    assert found["lattice_loss"] != found["lattice_loss"]  # NaN is a value here
    assert "lattice_mfu_ratio" not in found  # not known, so not there
    seconds = Account(EVENTS).seconds
    assert {cause: found[f"lattice_spent_seconds cause={cause}"] for cause in CAUSES} == seconds
    assert seconds["start"] == 4.0


def test_a_state_before_the_first_step_and_after_the_end():
    assert shown(RunState())["lattice_running"] == 0
    state = state_of([*EVENTS, {"event": "end", "time": 1.0, "state": "failed", "step": 3}], RECORD)
    assert shown(state)["lattice_running"] == 0
    state.note_event(START)
    assert (state.slow, state.spares) == ({}, 0)  # not those of the start before
    state.note_event(EVENTS[6])
    state.note_event({"event": "data_stage", "time": 4.0, "data_stage": 1, "step": 4})
    # the changeover is no restart, and not a time without steps, for the rule LatticeNoStep
    assert (state.state, state.events["start"], state.start_time) == ("running", 2, 4.0)
    assert state.slow == {}  # its ranks are judged anew
    state.note_event({"event": "refused", "time": 5.0})
    assert shown(state)["lattice_state state=refused"] == 1


def test_an_address(monkeypatch):
    assert check.prometheus("9400") == ["127.0.0.1", 9400], "loopback unless a host is given"
    assert check.prometheus("0.0.0.0:9400") == ["0.0.0.0", 9400]
    assert check.prometheus("[::1]:9400") == ["::1", 9400]
    for wrong in ("0", "65536", "x", "host:", "-1", "١", "a/b:1", "::1"):
        with pytest.raises(UserError, match="neither a file"):
            check.prometheus(wrong)
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="prometheus_client is not installed"):
        check.prometheus("9400")


def test_the_endpoint_and_a_port_in_use_that_is_tried_again(monkeypatch):
    """And a client that sends nothing keeps no thread of the endpoint."""
    monkeypatch.setattr(prometheus, "CLIENT_SECONDS", 0.2)
    host, port = where = check.prometheus(str(free_port()))
    server, metrics = Shown(where), [*families("runs/x", state_of(EVENTS, RECORD))]
    with socket.create_server((host, port)), pytest.raises(OSError, match="in use"):
        server.update([])
    server.update(metrics)
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
        assert parsed(answer.read().decode())["lattice_step"] == 12
    with socket.create_connection((host, port), timeout=60) as slow:
        assert slow.recv(1) == b"", "its time is over"
    server.server.shutdown()
    server.server.server_close()


def test_the_file_of_a_monitor(tmp_path):
    """What happened before this start is counted, and what is heard meanwhile, but not what an
    earlier start added to metrics.jsonl."""
    (tmp_path / "run").mkdir()
    lines = [json.dumps(event) for event in EVENTS] * 2
    (tmp_path / "run" / "events.jsonl").write_text("\n".join(lines) + "\n")
    path, run = tmp_path / "lattice.prom", str(tmp_path / "run")
    with FedMonitor(tmp_path, prometheus=str(path)) as monitor:
        monitor.event("start", step=10, world_size=8, began=20.0)
        wait_until(path.exists)
        found = parsed(path.read_text(), run)  # runs of two checkouts may both be runs/x
        assert (found["lattice_step"], found["lattice_last_step_timestamp_seconds"]) == (10, 9)
        monitor.step(11)
        monitor.event("end", state="requeue", step=11, reason="SIGTERM was received")
        monitor.end()
    found = parsed(path.read_text(), run)
    assert found["lattice_events_total event=start"] == 3
    assert found["lattice_events_total event=rollback"] == 2
    assert found["lattice_failed_saves_total"] == 2
    assert found["lattice_step"] == 11, "the last state is in it"
    assert found["lattice_state state=requeue"] == 1
    assert sorted(tmp_path.glob("lattice*")) == [path], "no partial file is left"
