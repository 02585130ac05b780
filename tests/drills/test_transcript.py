"""What one small run leaves for people and programs that watch it: events, status.json, the text
for Prometheus, alarms, and the exit status, over three starts in which things go wrong. Names and
order, no numbers."""

import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families

from runtime.log.events import read_events
from tests.health.faulty_runs import poisoned
from tests.monitor.alert_helpers import Receiver, wait_until
from tests.planted import planted
from tests.runs import forked, losses, status, status_of, write_config
from tools import launch
from training.step import TrainStep


class Start(NamedTuple):
    """What happens before which step of a start, and what it leaves."""

    faults: dict[int, str]
    events: str  # in order; without the lines that are written at each logged step
    alarms: str
    exit_status: int
    status: str  # what status.json begins with


STARTS = {
    "stopped": Start(
        {6: "no room", 7: "room", 9: "SIGTERM"},  # and steps 5 and 6 are bad at first
        "start system started checkpoint checkpoint spike spike rollback checkpoint checkpoint "
        "checkpoint end",
        "start spike rollback checkpoint end",
        128 + signal.SIGTERM,
        "requeue: SIGTERM was received",
    ),
    "killed": Start(
        {12: "SIGKILL"},
        "start system started end",
        "start end",
        1,
        "failed: rank 0 was killed by signal 9",
    ),
    "finished": Start(
        {},
        "start system started checkpoint checkpoint end",
        "start end",
        0,
        "finished: all steps done",
    ),
}
ALARM = {"text", "run", "folder", "host", "event", "step", "time", "details"}
SAMPLES = {  # those of every start
    *("alarms_delivered_total", "alarms_lost_total", "checkpoint_bytes", "checkpoint_step"),
    *("checkpoint_timestamp_seconds", "data_wait_seconds", "events_total", "failed_saves_total"),
    *("grad_norm", "last_step_timestamp_seconds", "learning_rate", "loss", "peak_memory_bytes"),
    *("running", "skipped_updates", "spent_seconds", "start_timestamp_seconds", "state"),
    *("step", "step_duration_seconds", "suspicions_total", "tokens", "tokens_per_second"),
    *("tokens_per_second_per_device", "updated_timestamp_seconds"),
}


def start(config: str, name: str) -> None:
    """Make one start on two ranks; a fault comes before its step, on rank 0."""

    @planted(TrainStep, "__call__")
    def troubled(call: Any, self: TrainStep, step: int, *batch: torch.Tensor) -> Any:
        fault = STARTS[name].faults.get(step + 1, "") if dist.get_rank() == 0 else ""
        if fault.endswith("room"):
            limit = 65_536 if fault == "no room" else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        elif fault:
            os.kill(os.getpid(), signal.Signals[fault])
        return call(self, step, *batch)

    def is_bad(call: int, tokens: torch.Tensor) -> bool:
        return name == "stopped" and call in (5, 6)

    with troubled(), poisoned(is_bad, 0):
        sys.argv = ["tools.launch", "--nproc-per-node", "2", config]
        sys.exit(launch.main())


def writing_to(log: Path) -> list[str]:
    """The processes whose standard error is this file."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += [process.name] if os.readlink(process / "fd/2") == str(log) else []
    return found


@pytest.mark.thorough
def test_each_start_is_told_as_ever(data, tmp_path):
    run, text, log = tmp_path / "run", tmp_path / "lattice.prom", tmp_path / "log"
    with Receiver() as server:
        config = write_config(
            tmp_path, data, model={"num_layers": 2}, train={"steps": 13},
            guard={"max_bad_steps": 2, "examine": False, "slow_ranks": "none"},
            checkpoint={"interval": 2, "async_save": False},
            run={"on_event": server.url, "prometheus": str(text), "log_interval": 1},
        )  # fmt: skip
        for name, expected in STARTS.items():
            before, heard = len(read_events(run)) if run.exists() else 0, len(server.received)
            assert status(forked(log, start, config, name)) == expected.exit_status
            wait_until(lambda: not writing_to(log))  # the monitor's process ends last
            kinds = [event["event"] for event in read_events(run)[before:]]
            assert "spent" in kinds
            assert " ".join(k for k in kinds if k not in ("spent", "memory")) == expected.events
            alarms = server.received[heard:]
            assert " ".join(alarm["event"] for alarm in alarms) == expected.alarms
            assert all(alarm.keys() == ALARM for alarm in alarms), name
            ended = status_of(tmp_path)
            assert ended.keys() == {"state", "step", "reason"}, name
            assert f"{ended['state']}: {ended['reason']}".startswith(expected.status)
            shown = [
                sample
                for family in text_string_to_metric_families(text.read_text())
                for sample in family.samples
            ]
            found = {sample.name.removeprefix("lattice_") for sample in shown}
            assert found - {"record"} == SAMPLES, name
            states = [each for each in shown if each.name == "lattice_state" and each.value]
            assert [each.labels["state"] for each in states] == [ended["state"]]
    assert sorted(losses(tmp_path)) == [*range(1, 14)]
