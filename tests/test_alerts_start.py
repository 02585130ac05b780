"""A start that fails before its first step or between two stages, and one that is refused, reach a
person, although no step's listeners are there to record them."""

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import train
from errors import UserError
from proofs.ranks import Ranks
from runtime import next_stage
from runtime.alerts import send
from runtime.messages import LOST
from runtime.records.events import read_events
from runtime.records.status import record_failed_start, record_failure
from runtime.signals import Signals
from tests.alert_helpers import FedCompanion, Receiver, wait_until
from tests.planted import planted
from tests.runs import contents, forked, losses, said_by, status, status_of, train_run, write_config
from tests.stages import write_stages
from tools import alarm

STAGES = [{"from_step": 2, "train": {"seq_len": 16}}]
REFUSAL = UserError("checkpoint.resume", "auto", "cannot be read", "mount the file system")


def run_that_cannot_build(arguments: list[str], call: int, refuses: bool = False) -> str:
    """Train; the model of the `call`-th stage that is built cannot be built, as without memory."""
    built = count(1)

    @planted(train, "build_stages")
    def build(honest: Any, *about: Any) -> Any:
        if next(built) == call:
            raise REFUSAL if refuses else RuntimeError("out of memory")
        return honest(*about)

    with build():
        return train_run(arguments)


@pytest.mark.parametrize(("call", "step"), [(1, 0), (2, 2)])
def test_a_failure_outside_of_steps(
    ranks: Ranks, data: Path, tmp_path: Path, call: int, step: int
) -> None:
    with Receiver() as server:
        config = write_stages(tmp_path, data, STAGES, run={"on_event": server.url})
        (said,) = ranks.run(said_by, 1, run_that_cannot_build, [config], call)
        assert "out of memory" in said
        wait_until(lambda: "end" in server.kinds())
        text = server.received[-1]["text"]
        # the next start goes on, and its end is not taken for a part of this one's
        assert ranks.run(train_run, 1, [config, "train.steps=3"]) == [""]
        wait_until(lambda: server.kinds()[-2:] == ["stage", "end"])
    before = [] if call == 1 else ["start"]
    assert server.kinds() == [*before, "end", "start", "stage", "end"]
    when = "while the run started" if call == 1 else "after step 2, outside of a step"
    assert f"failed at step {step}: RuntimeError {when}" in text
    assert "out of memory" in text
    assert sorted(losses(tmp_path)) == [1, 2, 3]
    ends = [e for e in read_events(tmp_path / "run") if e["event"] == "end" and "stage" not in e]
    whole = [(event["state"], event["step"]) for event in ends]
    assert whole == [("failed", step), ("finished", 3)]


def test_a_stage_that_is_refused_is_a_failure(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """The start was not refused: it has made steps, and its end is recorded."""
    with Receiver() as server:
        config = write_stages(tmp_path, data, STAGES, run={"on_event": server.url})
        assert ranks.run(run_that_cannot_build, 2, [config], 2, True) == [str(REFUSAL)] * 2
        wait_until(lambda: server.kinds() == ["start", "end"])
    assert "failed at step 2: checkpoint.resume" in server.received[-1]["text"]
    found = status_of(tmp_path)
    assert (found["state"], found["step"]) == ("failed", 2)


def without_the_others(config: str) -> None:
    """Train; in the changeover, the other ranks do not join again."""

    def alone(signals: Signals) -> None:
        dist.destroy_process_group()
        sys.exit("not all ranks joined")

    with patch.object(next_stage, "join_again", alone):
        train.main([config], Signals(speaks=True).listen())


def test_ranks_that_do_not_join_again(data: Path, tmp_path: Path) -> None:
    """Between two stages there is no process group. The code after a failure must not need it."""
    with Receiver() as server:
        config = write_stages(tmp_path, data, STAGES, run={"on_event": server.url})
        assert status(forked(tmp_path / "log", without_the_others, config)) == 1
        wait_until(lambda: server.kinds() == ["start", "end"])
    said = (tmp_path / "log").read_text()
    assert said.splitlines()[-1] == "not all ranks joined"
    assert "Traceback" not in said
    assert "failed at step 2: not all ranks joined" in server.received[-1]["text"]
    (lease,) = (tmp_path / "run" / "lease").glob("*.json")
    assert lease.stat().st_mtime == 0  # released: the next start need not wait


def test_between_two_stages_a_start_has_no_status(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """A launcher that finds a rank killed there must not report that the run has stopped as
    planned."""
    config = write_stages(tmp_path, data, STAGES)
    assert ranks.run(run_that_looks, 1, [config, "train.steps=3"], tmp_path / "run") == [True]
    found = status_of(tmp_path)
    assert (found["state"], found["step"]) == ("finished", 3)


def run_that_looks(arguments: list[str], folder: Path) -> bool:
    """Train; return whether there was no status.json between the two stages."""
    missing = []

    @planted(train, "next_start")
    def look(honest: Any, run: Any) -> Any:
        missing.append(not (folder / "status.json").exists())
        return honest(run)

    with look():
        assert train_run(arguments) == ""
    return missing[0]


def test_a_refused_start(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    """A requeued job whose checkpoints became unreadable at night, say."""
    with Receiver() as server:
        sections = {"checkpoint": {"interval": 2}, "run": {"on_event": server.url}}
        config = write_config(tmp_path, data, train={"steps": 2}, **sections)
        assert ranks.run(train_run, 1, [config]) == [""]
        before = contents(tmp_path / "run")
        # no command for its checkpoint either, which may be why this start is refused
        settings = ["train.steps=3", "model.ffn_dim=32", "checkpoint.after_commit=touch"]
        (said,) = ranks.run(train_run, 1, [config, *settings])
        wait_until(lambda: server.kinds()[-1] == "refused")
    assert server.kinds() == ["start", "end", "refused"]
    assert " ".join(said.split()) in server.received[-1]["text"]
    assert "ffn_dim" in said
    after = contents(tmp_path / "run")
    added = after.pop("events.jsonl").removeprefix(before.pop("events.jsonl"))
    assert json.loads(added)["event"] == "refused"
    assert after == before


def test_a_failed_start_is_not_the_one_after_it(tmp_path: Path) -> None:
    """The companion of a start that failed before its first step still runs when the next one
    begins."""
    with Receiver() as server, FedCompanion(tmp_path, on_event=server.url) as old:
        old.event("end", state="failed", step=3, reason="killed", noted_later=True)
        old.event("end", state="failed", step=3, reason="out of memory")
        wait_until(lambda: server.kinds() == ["end", "end"])
        old.event("start", step=3, world_size=1, began=0.0)
        old.event("spike", step=4, skipped=1, loss=0.0, grad_norm=0.0)
        old.end()
        assert server.kinds() == ["end", "end"]


def test_a_job_that_gives_up(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(send, "RETRY_SECONDS", (0.0, 0.0, 0.0))
    config = write_config(tmp_path, data)
    assert alarm.main(["gives up", config]) == 0  # nobody is to be told
    with Receiver() as server:
        told = f"run.on_event={server.url}"
        assert alarm.main(["Slurm job 7.2 gives up", config, told]) == 0
    (received,) = server.received
    assert received["text"] == f"{tmp_path}/run: Slurm job 7.2 gives up"
    assert (received["event"], received["step"]) == ("job", None)
    assert alarm.main(["gives up", config, "run.on_event=no-such-program"]) == 1
    assert "not delivered" in capsys.readouterr().err
    assert alarm.main(["gives up", config, "run.on_event=$NOT_SET_ANYWHERE"]) == 2
    assert "export NOT_SET_ANYWHERE" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


LOST_AT_START = f"{LOST} while the run started"


def test_the_launcher_names_the_rank_that_was_killed(tmp_path: Path) -> None:
    """Rank 0 knows only that it has lost a connection, also before the first step."""
    (tmp_path / "run").mkdir()
    record_failed_start(tmp_path / "run", LOST_AT_START)
    assert record_failure(tmp_path / "run", "rank 1 was killed") == "rank 1 was killed"
    found = status_of(tmp_path)
    assert (found["state"], found["reason"]) == ("failed", "rank 1 was killed")


def test_what_an_earlier_start_has_left_stays(tmp_path: Path) -> None:
    line = {"event": "end", "time": 1.0, "state": "failed", "step": 0, "reason": LOST_AT_START}
    (tmp_path / "events.jsonl").write_text(json.dumps(line) + "\n")
    assert record_failure(tmp_path, "rank 1 was killed") == "rank 1 was killed"
    assert not (tmp_path / "status.json").exists()
