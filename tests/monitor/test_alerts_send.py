"""How alarms are sent: a webhook that hangs, refuses or fails delays no step, and is not waited for
longer than stated; commands; and settings that cannot work are refused."""

import json
import time
from unittest.mock import patch

import pytest

from errors import UserError
from runtime.monitor import send
from runtime.monitor.alarms import alarm
from runtime.monitor.check import check_alerts
from runtime.monitor.send import Sender
from settings.load import load_config
from tests.monitor.alert_helpers import Receiver, wait_until
from tests.runs import write_config


@pytest.mark.parametrize("behaviour", ["hang", "refuse", 302])
def test_a_broken_webhook_is_tried_again_and_then_reported(behaviour, monkeypatch, capfd):
    monkeypatch.setattr(send, "LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(send, "RETRY_SECONDS", (0.01, 0.01, 0.01))
    lost: list[str] = []
    with Receiver("hang" if behaviour == "refuse" else behaviour) as server:
        url = "http://127.0.0.1:9/secret" if behaviour == "refuse" else server.url
        sender = Sender(url, ".", lambda alarm, why: lost.append(why))
        began = time.monotonic()
        sender.send(alarm("x", "/x", {"event": "hang", "time": 0.0, "step": 1, "where": "y"}))
        assert time.monotonic() - began < 0.5  # whoever sends does not wait
        wait_until(lambda: lost)
    assert len(server.received) == (0 if behaviour == "refuse" else 4)
    assert (sender.delivered, sender.failed) == (0, 1)
    said = capfd.readouterr().err
    assert "not delivered: x: hangs" in said
    assert "secret" not in said + lost[0]
    if isinstance(behaviour, int):
        assert lost == [f"the server answered {behaviour}"]


def test_the_queue_is_bounded_and_its_end_too(monkeypatch):
    monkeypatch.setattr(send, "WAITING", 3)
    lost: list[str] = []
    with Receiver("hang") as server:
        sender = Sender(server.url, ".", lambda alarm, why: lost.append(why))
        wait = {"event": "start", "time": 0.0}
        sender.send(alarm("x", "/x", wait))
        wait_until(lambda: server.received)
        for _ in range(4):
            sender.send(alarm("x", "/x", wait))
        assert lost == ["3 others are waiting"]
        sender.send(alarm("x", "/x", {"event": "end", "time": 0.0}))  # always waits, too
        assert len(lost) == 1
        began = time.monotonic()
        sender.finish(0.3)
        assert time.monotonic() - began < 5
    assert len(lost) == sender.failed == 6  # none is forgotten


def test_a_command_gets_the_alarm_and_may_fail_or_hang(monkeypatch, tmp_path):
    monkeypatch.setattr(send, "LIMIT_SECONDS", 600.0)
    event = {"event": "end", "time": 0.0, "state": "failed", "step": 3, "reason": "x; touch shell"}
    about = alarm("x", "/x", event)
    sender = Sender("sleep 600", str(tmp_path), lambda *_: None)

    def give(command: str, **more: str) -> str:
        with patch.object(sender, "target", command):
            return sender._give({**about, **more})

    says = 'echo "$LATTICE_EVENT $LATTICE_STEP $1" > said; cat > alarm.json'
    assert give(f"sh -c '{says}' sh 'two words'") == ""
    assert (tmp_path / "said").read_text() == "end 3 two words\n"
    assert json.loads((tmp_path / "alarm.json").read_text())["details"]["state"] == "failed"
    assert not (tmp_path / "shell").exists()
    assert "status 3" in give("sh -c 'exit 3'")
    with patch.object(send, "LIMIT_SECONDS", 0.2):
        assert "was ended after 0 s" in give("sleep 600")
    assert "cannot be started" in give("./none")
    assert "cannot be started" in give("true", text="an error with \0")
    # more than a pipe holds, also to a command that does not read it
    assert give("true", details="x" * 1_000_000) == ""
    assert give("sh -c 'wc -c | grep -q 1000...'", details="x" * 1_000_000) == ""
    # rank 0 has gone, and so does the monitor: it leaves nobody behind
    monkeypatch.setattr(send, "LOOK_SECONDS", 0.5)
    sender.send(about)
    sender.finish(2.0)
    assert not sender._thread.is_alive(), "its command has ended before"


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("run.on_event", "https:///path", "not the URL"),
        ("run.on_event", "'unclosed", "is not a command"),
        ("run.on_event", "$LATTICE_NO_SUCH_VARIABLE", "not set"),
        ("run.prometheus", "/no/such/folder/x.prom", "not a writable folder"),
        ("checkpoint.after_commit", "no-such-program", "not an executable"),
    ],
)
def test_what_cannot_work_is_refused(data, tmp_path, key, value, why):
    section, name = key.split(".")
    config = load_config(write_config(tmp_path, data, **{section: {name: value}}), [])
    with pytest.raises(UserError, match=why) as refused:
        check_alerts(config)
    assert refused.value.key == key


def test_a_secret_stays_in_its_variable(data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOOK", "https://example.org/secret")
    config = load_config(write_config(tmp_path, data, run={"on_event": "$HOOK"}), [])
    check_alerts(config)
    assert config.run.on_event == "$HOOK"  # what config.yaml and wandb get
    for mistyped in ("hooks.example.org/secret", "'secret", "https://example.org/a secret"):
        monkeypatch.setenv("HOOK", mistyped)
        with pytest.raises(UserError) as refused:
            check_alerts(config)
        assert "secret" not in str(refused.value)
