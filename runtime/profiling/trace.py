"""`run.trace=true`: record when each rank executed each pipeline action of one step, in
RUN/trace.json.

The file is a Chrome trace: https://ui.perfetto.dev opens it, and `python -m tools.timeline --trace
RUN` draws it."""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from costs.timeline import MICROSECONDS, NAMES, Timeline
from parallel.mesh import Mesh
from parallel.pipeline.actions import Action
from parallel.pipeline.simulate import Event
from runtime.device import seconds_between, time_mark
from runtime.files import write_or_warn
from runtime.listener import Listener, Run
from runtime.output import log
from settings.data_stages import DataStage

AFTER = 2  # first steps that are not traced, because they allocate, connect and compile
BARRIERS = 16  # to compare clocks


class StepTrace(Listener):
    """Traces one step of a start: the third, or the last if there are fewer."""

    def __init__(self, data_stage: DataStage, mesh: Mesh, first_step: int) -> None:
        config = data_stage.config
        self.mesh, self.path = mesh, Path(config.run.dir) / "trace.json"
        self.step = min(first_step + AFTER, data_stage.steps.stop - 1) if config.run.trace else -1
        self._offset = 0.0
        self._recorder: ActionRecorder | None = None  # of the current step

    def before_step(self, run: Run) -> None:
        if run.step == self.step:
            self._offset = clock_offset(self.mesh.device)
            run.train.record = self._recorder = ActionRecorder(self.mesh.device)

    def after_step(self, run: Run) -> None:
        if self._recorder is not None:
            run.train.record = nullcontext
            self._write(self._recorder.events(self._offset))
            self._recorder = None

    def _write(self, events: list[Event]) -> None:
        """Gather the events of all ranks on rank 0 and write one file: a process for each pipeline
        (a position on the axes other than pp), with a thread for each of its ranks."""
        world = dist.get_world_size()
        everyone: list[Any] | None = [None] * world if dist.get_rank() == 0 else None
        dist.gather_object(events, everyone)
        if everyone is None:
            return
        start = min(lane[0].start for lane in everyone)
        pipelines: dict[str, list[list[Event]]] = {}
        # in the order of ranks, and so in the order of stages within each pipeline
        for rank, lane in enumerate(everyone):
            place = self.mesh.sizes.coordinates(rank).items()
            name = " ".join(f"{axis} {index}" for axis, index in place if axis != "pp")
            lane = [Event(a, s - start, e - start) for a, s, e in lane]
            pipelines.setdefault(name, []).append(lane)
        trace = to_chrome({name: Timeline(lanes) for name, lanes in pipelines.items()})
        if write_or_warn(self.path, json.dumps(trace) + "\n"):
            log(f"traced step {self.step + 1} to {self.path}", sys.stdout)


def to_chrome(pipelines: dict[str, Timeline]) -> dict[str, Any]:
    """Convert timelines in milliseconds to a Chrome trace: a named process for each pipeline, a
    lane ("thread") for each of its ranks, an event for each action."""
    events: list[dict[str, Any]] = []
    for pid, (pipeline, timeline) in enumerate(pipelines.items()):
        process = {"ph": "M", "name": "process_name", "pid": pid}
        events.append({**process, "args": {"name": pipeline}})
        for rank, lane in enumerate(timeline.ranks):
            at, name = {"pid": pid, "tid": rank}, {"name": f"rank {rank}"}
            events.append({"ph": "M", "name": "thread_name", **at, "args": name})
            for action, start, end in lane:
                kind, stage, microbatch = action
                ts, dur = (round(t * MICROSECONDS, 3) for t in (start, end - start))
                told = {"kind": kind.value, "stage": stage, "microbatch": microbatch}
                named = {"ph": "X", "name": str(action), "cat": NAMES[kind]}
                events.append({**named, **at, "ts": ts, "dur": dur, "args": told})
    return {"displayTimeUnit": "ms", "traceEvents": events}


class ActionRecorder:
    """Records when actions begin and end; pass it to the runner as `record`. An action does not
    include the wait for its message.

    On a GPU, the times are those at which the device reached the action's begin and end in its
    stream; recording does not wait for the device.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._marks: list[tuple[Action, Any, Any]] = []
        self._zero = time_mark(device)
        if device == "cuda":
            self._zero.synchronize()
        self._zero_seconds = time.perf_counter()

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        begin = time_mark(self.device)
        yield
        self._marks.append((action, begin, time_mark(self.device)))

    def events(self, offset: float) -> list[Event]:
        """Return the recorded events in milliseconds, by this process's clock less `offset`
        seconds. Waits for the device."""

        def milliseconds(mark: Any) -> float:
            return (self._zero_seconds - offset + seconds_between(self._zero, mark)) * 1e3

        return [Event(action, milliseconds(a), milliseconds(b)) for action, a, b in self._marks]


def clock_offset(device: str) -> float:
    """Measure by how many seconds this process's clock is ahead of rank 0's; a collective call.

    All ranks leave a barrier at nearly the same moment, so the difference between their clocks at
    that moment is their offset. The median over several barriers is accurate to about the duration
    of one.
    """
    mine = []
    for _ in range(BARRIERS):
        dist.barrier()
        mine.append(time.perf_counter())
    first = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.broadcast(first, src=0)
    return statistics.median(a - b for a, b in zip(mine, first.tolist(), strict=True))
