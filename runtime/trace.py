"""`run.trace=true`: what every rank did when, in one step, as RUN/trace.json.

It is a Chrome trace: https://ui.perfetto.dev opens it, and `python -m tools.timeline --trace RUN`
draws it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallel.mesh import Mesh
from parallel.pipeline.chrome import merge_chrome, to_chrome
from parallel.pipeline.runner import record_nothing
from parallel.pipeline.simulate import Event, Timeline
from parallel.pipeline.trace import ActionRecorder, clock_offset
from training.config import Config
from training.step import TrainStep

AFTER = 2  # steps are not traced at a start: they allocate memory, connect and compile


class StepTrace:
    """Traces one step of a start, the third, or the last where there are fewer."""

    def __init__(self, config: Config, mesh: Mesh, first_step: int) -> None:
        self.mesh, self.path = mesh, Path(config.run.dir) / "trace.json"
        self.step = min(first_step + AFTER, config.train.steps - 1) if config.run.trace else None

    @contextmanager
    def around(self, train: TrainStep, step: int) -> Iterator[None]:
        """Around step `step`; costs nothing unless it is the one."""
        if step != self.step:
            yield
            return
        offset = clock_offset(self.mesh.device)
        recorder = ActionRecorder(self.mesh.device)
        train.record = recorder
        yield
        train.record = record_nothing
        self._write(recorder.events(offset))

    def _write(self, events: list[Event]) -> None:
        """Rank 0 puts all ranks' events in one file: a process for each pipeline (one position on
        the other axes), in it a thread for each of its ranks."""
        mine = (self.mesh.coordinates(), events)
        everyone: list[Any] | None = (
            [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        )
        dist.gather_object(mine, everyone)
        if everyone is None:
            return
        pipelines: dict[str, list[list[Event]]] = {}
        # in the order of ranks: for each pipeline, in that of its stages
        for coordinates, lane in everyone:
            name = " ".join(
                f"{axis} {index}" for axis, index in coordinates.items() if axis != "pp"
            )
            pipelines.setdefault(name, []).append(lane)
        start = min(lane[0].start for _, lane in everyone)
        traces = []
        for name, lanes in pipelines.items():
            timeline = Timeline(
                [[Event(a, s - start, e - start) for a, s, e in lane] for lane in lanes]
            )
            traces.append((name, to_chrome(timeline)))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(merge_chrome(traces)) + "\n", encoding="utf-8")
        print(
            f"traced step {self.step + 1 if self.step is not None else 0} to {self.path}",
            flush=True,
        )
