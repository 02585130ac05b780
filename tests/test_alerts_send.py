"""How alarms are sent: a webhook that hangs, refuses or fails delays no step, and is not waited for
longer than stated; commands; and settings that cannot work are refused."""

import ast
import json
import time
from pathlib import Path

import pytest

from errors import UserError
from proofs.ranks import Ranks
from runtime.alerts import send
from runtime.alerts.alarms import alarm
from runtime.alerts.check import check_alerts
from runtime.alerts.companion import END_EVENT_SECONDS, ENDING_SECONDS
from runtime.alerts.send import Sender
from tests.alert_helpers import ROOT, FedCompanion, Receiver, wait_until
from tests.runs import fresh, losses, train_run, write_config
from training.load_config import load_config

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
@pytest.mark.parametrize("behaviour", ["hang", "refuse", 500])
def test_a_broken_webhook_delays_no_step_of_a_run(
    behaviour: int | str, ranks: Ranks, data: Path, tmp_path: Path
) -> None:
    """The same run with a broken webhook and with none: the same losses, all steps while the
    webhook hangs, and an end that waits no longer than stated."""
    with Receiver("hang" if behaviour == "refuse" else behaviour) as server:
        url = "http://127.0.0.1:9/secret" if behaviour == "refuse" else server.url
        alone = write_config(tmp_path, data, checkpoint={"interval": 2})
        assert ranks.run(train_run, 2, [alone]) == [""] * 2
        expected = losses(tmp_path)
        fresh(tmp_path)
        config = write_config(tmp_path, data, checkpoint={"interval": 2}, run={"on_event": url})
        # on a busy machine a rank may indeed be slow, which would be a further alarm
        assert ranks.run(train_run, 2, [config, "guard.slow_ranks=none"]) == [""] * 2
        left = time.time()
    assert losses(tmp_path) == expected
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    ended = next(event["time"] for event in events if event["event"] == "end")
    # After its end the run waited no longer than stated (and 15 s for a busy machine).
    assert left - ended < ENDING_SECONDS + END_EVENT_SECONDS + 15
    if behaviour == "hang":  # the alarm of its start was given up after its last step
        assert all(event["time"] > ended for event in events if event["event"] == "undelivered")
    lost = [event["about"] for event in events if event["event"] == "undelivered"]
    assert lost == ["start", "end"]


def test_training_calls_nothing_that_waits() -> None:
    """By design: in a step the listener only asks whether the process is alive (and writes to a
    pipe that never waits, `tell`)."""
    tree = ast.parse((ROOT / "runtime/alerts/rank_0.py").read_text())
    methods = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert not methods.keys() & {"before_step", "went_back", "ends"}
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        for name in ("begins", "after_step", "check")
        for node in ast.walk(methods[name])
        if isinstance(node, ast.Call)
    }
    assert called == {"is_due", "check", "tell", "poll", "log"}


# --- commands, variables, refusals ----------------------------------------------------------------


def test_a_command_gets_the_alarm(tmp_path: Path) -> None:
    script = tmp_path / "notify"
    script.write_text(
        '#!/bin/sh\necho "$LATTICE_EVENT $LATTICE_STEP $1" > said; cat > alarm.json\n'
    )
    script.chmod(0o755)
    with FedCompanion(tmp_path, on_event=f"{script} 'two words'") as companion:
        companion.event("start", step=0, world_size=1, began=0.0)
        companion.event("end", state="failed", step=3, reason="x; touch shell")
        companion.end()
    assert (tmp_path / "said").read_text() == "end 3 two words\n"
    assert json.loads((tmp_path / "alarm.json").read_text())["details"]["state"] == "failed"
    assert not (tmp_path / "shell").exists()


def test_a_command_that_fails_or_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(send, "LIMIT_SECONDS", 0.2)
    about = alarm("x", "/x", {"event": "start", "time": 0.0})
    assert "status 3" in send._run_command("sh -c 'exit 3'", str(tmp_path), about)
    assert "did not end" in send._run_command("sleep 600", str(tmp_path), about)
    assert "cannot be started" in send._run_command("./none", str(tmp_path), about)
    null = {**about, "text": "an error with \0"}
    assert "cannot be started" in send._run_command("true", str(tmp_path), null)
    assert send._run_command("true", str(tmp_path), about) == ""


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
