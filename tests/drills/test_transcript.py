"""What one small run leaves for people and programs that watch it: the events with their entries,
status.json, the text for Prometheus, the alarms, and the exit status, over four starts in which
things go wrong. Names and order, no numbers."""

import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families

import train
from runtime.log.events import CAUSES, read_events
from runtime.signals import Signals
from tests.health.faulty_runs import poisoned
from tests.monitor.alert_helpers import Receiver, wait_until
from tests.planted import planted
from tests.runs import forked, losses, status, status_of, write_config
from tools import launch
from training.step import TrainStep

pytestmark = pytest.mark.thorough
# name → number of ranks (0: one, without a launcher), what happens before a step
STARTS: dict[str, tuple[int, dict[int, str]]] = {
    "stopped": (2, {6: "no room", 7: "room", 9: "SIGTERM"}),  # and steps 5 and 6 are bad at first
    "killed": (2, {12: "SIGKILL"}),
    "killed without a launcher": (0, {12: "SIGKILL"}),
    "finished": (2, {}),
}


def start(config: str, name: str) -> None:
    """Make one start, as `tools.launch` or `train.py` does; a fault comes before its step, on rank
    0."""
    world, faults = STARTS[name]

    @planted(TrainStep, "__call__")
    def troubled(call: Any, self: TrainStep, step: int, *batch: torch.Tensor) -> Any:
        fault = faults.get(step + 1, "") if dist.get_rank() == 0 else ""
        if fault.endswith("room"):
            limit = 65_536 if fault == "no room" else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        elif fault:
            os.kill(os.getpid(), signal.Signals[fault])
        return call(self, step, *batch)

    def is_bad(call: int, tokens: torch.Tensor) -> bool:
        return name == "stopped" and call in (5, 6)

    with troubled(), poisoned(is_bad, 0):
        if not world:
            train.main([config], Signals(speaks=True).listen())
            return
        sys.argv = ["tools.launch", "--nproc-per-node", str(world), config]
        sys.exit(launch.main())


@pytest.fixture(scope="module")
def transcript(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each start has left or added."""
    folder, found = tmp_path_factory.mktemp("transcript"), {}
    run, text, log = folder / "run", folder / "lattice.prom", folder / "log"
    with Receiver() as server:
        config = write_config(
            folder, data, model={"num_layers": 2}, train={"steps": 13},
            guard={"max_bad_steps": 2, "examine": False, "slow_ranks": "none"},
            checkpoint={"interval": 2, "async_save": False},
            run={"on_event": server.url, "prometheus": str(text), "log_interval": 1},
        )  # fmt: skip
        for name in STARTS:
            events, alarms = len(read_events(run)) if run.exists() else 0, len(server.received)
            exit_status = status(forked(log, start, config, name))
            wait_until(lambda: not writing_to(log))  # the monitor's process ends last
            found[name] = {
                "exit": exit_status,
                "events": read_events(run)[events:],
                "alarms": server.received[alarms:],
                "status": status_of(folder) if (run / "status.json").exists() else None,
                "samples": samples(text.read_text()),
            }
    assert sorted(losses(folder)) == [*range(1, 14)]
    return found


def writing_to(log: Path) -> list[str]:
    """The processes whose standard error is this file."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += [process.name] if os.readlink(process / "fd/2") == str(log) else []
    return found


def samples(text: str) -> dict[str, float]:
    """Name and labels → value. A label whose value differs from run to run is listed without its
    value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            fixed = {"cause", "event", "state", "verdict"}
            labels = [f"{k}={v}" if k in fixed else k for k, v in sorted(sample.labels.items())]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


EVENTS = {  # in order; without the lines that are written at each logged step
    "stopped": "start system started checkpoint checkpoint spike spike rollback checkpoint "
    "checkpoint checkpoint end",
    "killed": "start system started end",
    "killed without a launcher": "start system started end died",
    "finished": "start system started checkpoint checkpoint end",
}
ENTRIES = {  # besides `event` and `time`
    "start": {"began step world_size"},
    "system": {"device layout parameters python torch world_size"},
    "started": {"seconds step"},
    "spent": {"seconds step"},
    "memory": {"peak_bytes step"},
    "checkpoint": {"bytes stall_seconds step write_seconds", "failed step"},
    "spike": {"grad_norm loss skipped step"},
    "rollback": {"from_step left_out step"},
    "died": {"reason step"},
    "end": {"reason state step"},
}
ALARMS = {
    "stopped": "start spike rollback checkpoint end",
    "killed": "start end",
    "killed without a launcher": "start died",
    "finished": "start end",
}
EXITS: dict[str, tuple[int, str | None]] = {  # and what status.json begins with
    "stopped": (143, "requeue: SIGTERM was received"),
    "killed": (1, "failed: rank 0 was killed by signal 9"),
    "killed without a launcher": (-9, None),
    "finished": (0, "finished: all steps done"),
}
ENDS = dict(zip(STARTS, ("requeue", "failed", "died", "finished"), strict=True))
SAMPLES = {  # those of every start, each with the label `run`
    *("alarms_delivered_total", "alarms_lost_total", "checkpoint_bytes", "checkpoint_step"),
    *("checkpoint_timestamp_seconds", "data_wait_seconds", "failed_saves_total", "grad_norm"),
    *("last_step_timestamp_seconds", "learning_rate", "loss", "peak_memory_bytes", "running"),
    *("skipped_updates", "start_timestamp_seconds", "step", "step_duration_seconds", "tokens"),
    *("tokens_per_second", "tokens_per_second_per_device", "updated_timestamp_seconds"),
}
KINDS = {  # of events, which are counted
    *("start", "started", "system", "spares", "memory", "spent", "checkpoint", "rollback"),
    *("data_stage", "spike", "hang", "slow_rank", "suspicion", "end", "stalled", "resumed", "died"),
    *("refused", "after_commit", "job"),
}
VERDICTS = ("transient", "persistent", "reproducible", "not examined")


@pytest.mark.parametrize("name", STARTS)
def test_a_start_is_told_as_ever(transcript: dict[str, dict[str, Any]], name: str) -> None:
    told = transcript[name]
    kinds = [event["event"] for event in told["events"]]
    assert " ".join(k for k in kinds if k not in ("spent", "memory")) == EVENTS[name]
    assert "spent" in kinds
    for event in told["events"]:
        assert " ".join(sorted(event.keys() - {"event", "time"})) in ENTRIES[event["event"]]
    assert " ".join(alarm["event"] for alarm in told["alarms"]) == ALARMS[name]
    for alarm in told["alarms"]:
        keys = {"text", "run", "folder", "host", "event", "step", "time", "details"}
        assert alarm.keys() == keys
    exit_status, ended = EXITS[name]
    assert told["exit"] == exit_status
    if ended is None:
        assert told["status"] is None
    else:
        assert told["status"].keys() == {"state", "step", "reason"}
        assert f"{told['status']['state']}: {told['status']['reason']}".startswith(ended)


@pytest.mark.parametrize("name", STARTS)
def test_prometheus_is_told_as_ever(transcript: dict[str, dict[str, Any]], name: str) -> None:
    found = transcript[name]["samples"]
    expected = {f"lattice_{sample} run" for sample in SAMPLES}
    expected |= {f"lattice_events_total event={kind} run" for kind in KINDS}
    expected |= {f"lattice_spent_seconds cause={cause} run" for cause in CAUSES}
    expected |= {f"lattice_suspicions_total run verdict={verdict}" for verdict in VERDICTS}
    expected |= {
        f"lattice_state run state={state}" for state in ("starting", "running", *ENDS.values())
    }
    assert found.keys() - {"lattice_record name run"} == expected  # for those without a name here
    states = {sample for sample, is_so in found.items() if "lattice_state" in sample and is_so}
    assert states == {f"lattice_state run state={ENDS[name]}"}
