"""How alarms are sent: a webhook that hangs, refuses or fails delays no step, and is not waited for
longer than stated; commands; and settings that cannot work are refused."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from errors import UserError
from proofs.ranks import Ranks
from runtime.log.events import read_events
from runtime.monitor import send
from runtime.monitor.alarms import alarm
from runtime.monitor.check import check_alerts
from runtime.monitor.process import END_EVENT_SECONDS, ENDING_SECONDS
from runtime.monitor.send import Sender
from settings.load import load_config
from tests.monitor.alert_helpers import FedMonitor, Receiver, wait_until
from tests.runs import fresh, losses, run, write_config

# --- a webhook that does not work -----------------------------------------------------------------


@pytest.mark.parametrize("behaviour", ["hang", "refuse", 500, 302])
def test_a_broken_webhook_is_tried_again_and_then_reported(
    behaviour: int | str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(send, "LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(send, "RETRY_SECONDS", (0.01, 0.01, 0.01))
    lost: list[str] = []
    with Receiver("hang" if behaviour == "refuse" else behaviour) as server:
        url = "http://127.0.0.1:9/services/secret" if behaviour == "refuse" else server.url
        sender = Sender(url, ".", lambda alarm, why: lost.append(why))
        began = time.monotonic()
        sender.send(alarm("x", "/x", {"event": "hang", "time": 0.0, "step": 1, "where": "y"}))
        assert time.monotonic() - began < 0.1  # whoever sends does not wait
        wait_until(lambda: lost)
    assert len(server.received) == (0 if behaviour == "refuse" else 4)
    assert (sender.delivered, sender.failed) == (0, 1)
    said = capfd.readouterr().err
    assert "not delivered: x: hangs" in said
    assert "secret" not in said + lost[0]
    if isinstance(behaviour, int):
        assert lost == [f"the server answered {behaviour}"]


def test_a_webhook_that_works_again_gets_the_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "RETRY_SECONDS", (0.01, 0.01, 0.01))
    answers = iter(["the server answered 500", "ConnectionError", "", ""])
    monkeypatch.setattr(send, "_post", lambda url, alarm: next(answers))
    sender = Sender("http://x", ".", lambda *_: pytest.fail("lost"))
    for _ in range(2):
        sender.send(alarm("x", "/x", {"event": "start", "time": 0.0}))
    sender.finish(30)
    assert (sender.delivered, sender.failed) == (2, 0)


def test_the_queue_is_bounded_and_its_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.thorough
def test_a_broken_webhook_delays_no_step_of_a_run(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """The same run with a webhook that hangs and with none: the same losses, all steps while it
    hangs, and an end that waits no longer than stated."""
    run(ranks, 2, write_config(tmp_path, data, checkpoint={"interval": 2}))
    expected = losses(tmp_path)
    fresh(tmp_path)
    with Receiver("hang") as server:
        told = {"on_event": server.url}
        config = write_config(tmp_path, data, checkpoint={"interval": 2}, run=told)
        # on a busy machine a rank may indeed be slow, which would be a further alarm
        run(ranks, 2, config, "guard.slow_ranks=none")
        left = time.time()
    assert losses(tmp_path) == expected
    events = read_events(tmp_path / "run")
    ended = next(event["time"] for event in events if event["event"] == "end")
    # After its end the run waited no longer than stated (and 15 s for a busy machine).
    assert left - ended < ENDING_SECONDS + END_EVENT_SECONDS + 15
    # the alarm of its start was given up after its last step
    lost = [event for event in events if event["event"] == "undelivered"]
    assert all(event["time"] > ended for event in lost)
    assert [event["about"] for event in lost] == ["start", "end"]


# --- commands, variables, refusals ----------------------------------------------------------------


def test_a_command_gets_the_alarm(tmp_path: Path) -> None:
    script = tmp_path / "notify"
    script.write_text(
        '#!/bin/sh\necho "$LATTICE_EVENT $LATTICE_STEP $1" > said; cat > alarm.json\n'
    )
    script.chmod(0o755)
    with FedMonitor(tmp_path, on_event=f"{script} 'two words'") as monitor:
        monitor.event("start", step=0, world_size=1, began=0.0)
        monitor.event("end", state="failed", step=3, reason="x; touch shell")
        monitor.end()
    assert (tmp_path / "said").read_text() == "end 3 two words\n"
    assert json.loads((tmp_path / "alarm.json").read_text())["details"]["state"] == "failed"
    assert not (tmp_path / "shell").exists()


def test_a_command_that_fails_or_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    about = alarm("x", "/x", {"event": "start", "time": 0.0})
    ends_at = [float("inf")]

    def give(command: str, about: dict[str, Any]) -> str:
        return send._give(command, str(tmp_path), lambda: ends_at[0], about)

    assert "status 3" in give("sh -c 'exit 3'", about)
    with monkeypatch.context() as short:
        short.setattr(send, "LIMIT_SECONDS", 0.2)
        said = give("sleep 600", about)
    assert "was ended after 0 s" in said
    assert "cannot be started" in give("./none", about)
    null = {**about, "text": "an error with \0"}
    assert "cannot be started" in give("true", null)
    assert give("true", about) == ""
    # more than a pipe holds, to a command that does not read it
    assert give("true", {**about, "details": "x" * 1_000_000}) == ""
    assert give("sh -c 'wc -c | grep -q 1000...'", {**about, "details": "x" * 1_000_000}) == ""
    ends_at[0] = 0.0  # rank 0 has gone, and so does the monitor: it leaves nobody behind
    assert "was ended after 0 s" in give("sleep 600", about)
    sender = send.Sender("sleep 600", str(tmp_path), lambda *_: None)
    sender.send(about)
    sender.finish(3.0)
    assert not sender._thread.is_alive(), "its command has ended before"


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("run.on_event", "no-such-program --now", "not an executable"),
        ("run.on_event", "'unclosed", "is not a command"),
        ("run.on_event", "https:///path", "not the URL"),
        ("run.on_event", "$LATTICE_NO_SUCH_VARIABLE", "not set"),
        ("run.prometheus", "0.0.0.0:", "neither a file"),
        ("run.prometheus", ":9400", "neither a file"),
        ("run.prometheus", "/no/such/folder/x.prom", "not a writable folder"),
        ("checkpoint.after_commit", "no-such-program", "not an executable"),
    ],
)
def test_what_cannot_work_is_refused(
    data: Path, tmp_path: Path, key: str, value: str, why: str
) -> None:
    section, name = key.split(".")
    config = load_config(write_config(tmp_path, data, **{section: {name: value}}), [])
    with pytest.raises(UserError, match=why) as refused:
        check_alerts(config)
    assert refused.value.key == key


def test_a_secret_stays_in_its_variable(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "https://example.org/secret")
    config = load_config(write_config(tmp_path, data, run={"on_event": "$HOOK"}), [])
    check_alerts(config)
    assert config.run.on_event == "$HOOK"  # what config.yaml and wandb get
    for mistyped in ("hooks.example.org/secret", "'secret", "https://example.org/a secret"):
        monkeypatch.setenv("HOOK", mistyped)
        with pytest.raises(UserError) as refused:
            check_alerts(config)
        assert "secret" not in str(refused.value)
