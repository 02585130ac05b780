"""A start that fails before its first step or between two stages, and one that is refused, reach a
person, although no step's listeners are there to record them."""

import json
import sys
import time
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import train
from errors import UserError
from runtime.exit import LOST, LostConnection
from runtime.log.status import record_failure
from runtime.monitor import send
from runtime.signals import Signals
from tests import runs
from tests.monitor.alert_helpers import Receiver
from tests.planted import planted
from tests.settings.stages import write_stages
from tools import alarm

STAGES = [{"from_step": step, "train": {"seq_len": 16 * step}} for step in (1, 2)]
REFUSAL = UserError("checkpoint.resume", "auto", "cannot be read", "mount the file system")
NO_MEMORY = RuntimeError("out of memory")
# starts in one folder, one after another: which stage that is built cannot be, and why; the alarms,
# what the last one says, and the end
STARTS: dict[str, tuple[int, Exception | None, str, str, tuple[str, int]]] = {
    "while it starts": (1, NO_MEMORY, "end",
        "failed at step 0: RuntimeError while the run started", ("failed", 0)),
    "between two stages": (2, NO_MEMORY, "start end",
        "failed at step 1: RuntimeError after step 1, outside of a step", ("failed", 1)),
    # the start was not refused: it has made steps, and its end is recorded
    "a stage that is refused": (2, REFUSAL, "start data_stage end",
        "failed at step 2: checkpoint.resume", ("failed", 2)),
    "none": (0, None, "start data_stage end", "finished at step 3", ("finished", 3)),
}  # fmt: skip


def run_that_cannot_build(arguments: list[str], name: str) -> str:
    """Train; the model of one stage cannot be built, as without memory."""
    call, error, *_ = STARTS[name]
    built = count(1)

    @planted(train, "build_stages")
    def build(honest: Any, *about: Any) -> Any:
        if next(built) == call:
            raise error
        return honest(*about)

    with build():
        return runs.train_run(arguments)


def test_how_a_start_ends_is_reported(ranks, data, tmp_path):
    """The next start goes on, and its end is not taken for a part of this one's."""
    folder, kinds = tmp_path / "run", list[str]()
    with Receiver() as server:
        run = {"on_event": server.url}
        config = write_stages(tmp_path, data, STAGES, train={"steps": 3}, run=run)
        for name, (_, error, more, text, _) in STARTS.items():
            ranks.run(runs.said_by, 1, run_that_cannot_build, [config], name)
            server.wait_for(*(kinds := [*kinds, *more.split()]))
            assert text in server.received[-1]["text"]
            assert ("out of memory" in server.received[-1]["text"]) == (error is NO_MEMORY)
        ends = runs.events_of(folder, "end")
        assert [(e["state"], e["step"]) for e in ends] == [end for *_, end in STARTS.values()]
        assert sorted(runs.losses(tmp_path)) == [1, 2, 3]
        # One that is refused: a requeued job whose checkpoints became unreadable at night, say. No
        # command for its checkpoint is run either, which may be why it is refused.
        before = runs.contents(folder)
        settings = ["train.steps=4", "model.ffn_dim=32", "checkpoint.after_commit=touch"]
        (said,) = ranks.run(runs.train_run, 1, [config, *settings])
        server.wait_for(*kinds, "refused")
    assert "ffn_dim" in said
    assert " ".join(said.split()) in server.received[-1]["text"]
    after = runs.contents(folder)
    added = after.pop("events.jsonl").removeprefix(before.pop("events.jsonl"))
    assert json.loads(added)["event"] == "refused"
    assert after == before


def without_the_others(config: str) -> None:
    """Train; in the changeover, the other ranks do not join again."""

    def alone(signals: Signals) -> None:
        dist.destroy_process_group()
        sys.exit("not all ranks joined")

    with patch.object(train, "join_again", alone):
        train.main([config], Signals(speaks=True).listen())


def test_ranks_that_do_not_join_again(data, tmp_path):
    """Between two stages there is no process group. The code after a failure must not need it."""
    with Receiver() as server:
        config = write_stages(tmp_path, data, STAGES[1:], run={"on_event": server.url})
        assert runs.status(runs.forked(tmp_path / "log", without_the_others, config)) == 1
        server.wait_for("start", "end")
    said = (tmp_path / "log").read_text()
    assert said.splitlines()[-1] == "not all ranks joined"
    assert "Traceback" not in said
    assert "failed at step 2: not all ranks joined" in server.received[-1]["text"]
    (lease,) = (tmp_path / "run" / "lease").glob("*.json")
    assert lease.stat().st_mtime == 0  # released: the next start need not wait


def test_a_job_that_gives_up(monkeypatch, data, tmp_path, capsys):
    monkeypatch.setattr(send, "RETRY_SECONDS", (0.0, 0.0, 0.0))
    twice = {"cpu_offload": True, "offload": "none"}  # the job may end because of these
    config = runs.write_config(tmp_path, data, parallel=twice, trian={"steps": 2})
    assert alarm.main(["gives up", config]) == 0  # nobody is to be told
    with Receiver() as server:
        told = f"run.on_event={server.url}"
        assert alarm.main(["Slurm job 7.2 gives up", config, "train.setps=3", told]) == 0
    (received,) = server.received
    assert received["text"] == f"{tmp_path}/run: Slurm job 7.2 gives up"
    assert (received["event"], received["step"]) == ("job", None)
    assert alarm.main(["gives up", config, "run.on_event=no-such-program"]) == 1
    assert "not delivered" in capsys.readouterr().err
    assert alarm.main(["gives up", config, "run.on_event=$NOT_SET_ANYWHERE"]) == 2
    assert "export NOT_SET_ANYWHERE" in capsys.readouterr().err
    assert alarm.main(["gives up", config, "run.on_evnt=x"]) == 2
    assert not (tmp_path / "run").exists()


def test_the_launcher_names_the_rank_that_was_killed(tmp_path):
    """Rank 0 knows only that it has lost a connection, also before the first step. But what an
    earlier start has left stays."""
    (tmp_path / "run").mkdir()
    launched, why = time.time(), "rank 1 was killed"
    with pytest.raises(LostConnection), runs.run_log_of(tmp_path / "run"):
        raise LostConnection("gone")
    for since, reason in ((launched + 60, f"{LOST} while the run started"), (launched, why)):
        assert record_failure(tmp_path / "run", why, since) == why
        found = runs.status_of(tmp_path)
        assert found["state"] == "failed"
        assert found["reason"].startswith(reason)
